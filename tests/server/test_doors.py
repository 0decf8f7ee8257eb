"""Who gets in: host names, keys and what their holders share. Over a real socket."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.protocols import PROTOCOLS
from tests.support.running import Running, serving
from vllm_mlx.server.guards import own_names

from .fakes import FakeEngine

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE: Any = {"model": "tiny", "max_tokens": 5, **CHAT}
OPTIONS = {"host_names": ("llm.example",)}


def asked_as(server: Running, host: str, path: str = "/health") -> httpx.Response:
    with server.http(headers={"host": host}) as client:
        return client.get(path)


OURS = [
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "127.0.0.1:1",
    "[::1]:8000",
    "[::1]",
    "192.168.1.7",
    "app.localhost",
]
OURS += ["host.docker.internal:8000", "LLM.example:443", *own_names()]


@pytest.mark.parametrize("host", OURS)
def test_addresses_and_own_names_are_answered(server: Running, host: str) -> None:
    assert asked_as(server, host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "xlocalhost", "a:b:c", "1.2.3"]
)
def test_a_name_that_a_page_could_own_is_refused(server: Running, host: str) -> None:
    refused = asked_as(server, host, "/v1/models")
    assert refused.status_code == 403
    assert "--allowed-host" in refused.json()["error"]["message"]
    assert asked_as(server, host).status_code == 403


def test_every_one_of_several_host_headers_is_looked_at(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")


def test_any_name_if_asked_for() -> None:
    with serving(FakeEngine(), host_names=("*",)) as server:
        assert asked_as(server, "whatever.example").status_code == 200


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(FakeEngine(), api_keys=("first", "second")) as running:
        yield running


def ask(server: Running, key: str | None, method: str, path: str, **options: Any) -> int:
    with server.http(headers={} if key is None else {"x-api-key": key}) as client:
        return client.request(method, path, **options).status_code


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/v1/status"), ("GET", "/v1/cache"),
        ("DELETE", "/v1/cache"), ("GET", "/v1/models"), ("POST", "/v1/messages"), ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"), ("GET", "/health/"), ("GET", "/HEALTH"), ("GET", "/x"),
    ],
)  # fmt: skip
def test_all_but_the_probes_is_closed(guarded: Running, method: str, path: str) -> None:
    assert ask(guarded, None, method, path) == 401
    assert ask(guarded, "firs", method, path) == 401


def test_the_probes_and_the_page_are_open(guarded: Running) -> None:
    assert {ask(guarded, None, "GET", path) for path in ("/health", "/", "/version", "/api/hello")} == {200}


def test_metrics_may_be_opened_alone() -> None:
    with serving(FakeEngine(), api_keys=("k",), metrics_open=True) as server:
        assert ask(server, None, "GET", "/metrics") != 401
        assert ask(server, None, "GET", "/v1/status") == 401


@pytest.mark.parametrize("name", PROTOCOLS)
def test_holders_of_different_keys_share_no_cache(guarded: Running, name: str) -> None:
    path, body = PROTOCOLS[name].path, PROTOCOLS[name].body("hi")
    salts = []
    for key, salt in (("first", None), ("first", None), ("second", None), ("second", "mine"), ("first", "mine")):
        fields = body if salt is None else {**body, "cache_salt": salt}
        assert ask(guarded, key, "POST", path, json=fields) == 200
        salts.append(guarded.engine.requests[-1].cache_salt)
    assert salts[0] == salts[1] and len(set(salts)) == 4
    assert not any("first" in salt or "second" in salt for salt in salts)


def test_tokens_are_counted_in_the_holder_s_own_memory(guarded: Running) -> None:
    for key in ("first", "second"):
        assert ask(guarded, key, "POST", "/v1/messages/count_tokens", json={"model": "tiny", **CHAT}) == 200
    one, other = guarded.engine.counted[-2:]
    assert one.cache_salt and other.cache_salt and one.cache_salt != other.cache_salt


def test_without_keys_the_salt_is_the_client_s(server: Running) -> None:
    for salt in ("", "mine"):
        ask(server, None, "POST", "/v1/chat/completions", json={**CHAT, "cache_salt": salt})
        assert server.engine.requests[-1].cache_salt == salt


EVERYTHING = [
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/v1/status/stream"),
    ("GET", "/v1/cache"),
    ("DELETE", "/v1/cache"),
    ("POST", "/v1/requests/anything/cancel"),
    ("POST", "/v1/responses/resp_anything/cancel"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("OPTIONS", "/v1/chat/completions"),
    ("GET", "/page/nothing.js"),
]
FOREIGN: list[list[tuple[str, str]]] = [
    [("origin", "http://evil.example")],
    [("origin", "null")],
    [("origin", "null"), ("host", "")],
    [("origin", "file://"), ("host", "")],
    [("origin", ""), ("host", "")],
    [("origin", "http://127.0.0.1:1")],
    [("origin", "http://llm.example.evil.example")],
    [("origin", "http://evil.example"), ("sec-fetch-site", "none")],
    [("sec-fetch-site", "cross-site")],
    [("sec-fetch-site", "same-site")],
    [("origin", "http://{host}"), ("origin", "http://evil.example")],
    [("origin", "http://{host}"), ("sec-fetch-site", "cross-site")],
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_pages_of_other_origins_reach_nothing(server: Running, headers: list[tuple[str, str]]) -> None:
    own = f"127.0.0.1:{server.port}"
    with server.http(headers=[(name, value.replace("{host}", own)) for name, value in headers]) as client:
        for method, path in EVERYTHING:
            answer = client.request(method, path, **({"json": MESSAGE} if method == "POST" else {}))
            assert answer.status_code == 403, (method, path)
            assert "--cors-origin" in answer.json()["error"]["message"]
    assert not server.engine.running


@pytest.mark.parametrize(
    "headers",
    [{}, {"sec-fetch-site": "none"}, {"origin": "http://{host}", "sec-fetch-site": "same-origin"}],
)
def test_programs_and_the_servers_own_page_are_answered(server: Running, headers: dict[str, str]) -> None:
    own = f"127.0.0.1:{server.port}"
    with server.http(headers={name: value.replace("{host}", own) for name, value in headers.items()}) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_link_leads_to_the_page_from_anywhere_and_to_nothing_else(server: Running) -> None:
    with server.http(headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}) as client:
        assert client.get("/").status_code == 200
        assert client.get("/v1/status/stream").status_code == 403


def test_allowed_origins_may_ask_and_no_others() -> None:
    with serving(FakeEngine(), cors_origins=("https://app.example",)) as server, server.http() as client:
        site = {"sec-fetch-site": "cross-site"}
        for origin, status in (("https://app.example", 200), ("https://other.example", 403)):
            answer = client.post("/v1/chat/completions", json=CHAT, headers={"origin": origin, **site})
            assert answer.status_code == status
        assert client.get("/v1/models", headers=site).status_code == 403
    with serving(FakeEngine(), cors_origins=("*",)) as server, server.http() as client:
        assert client.get("/v1/models", headers={"origin": "null", **site}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/unknown", "/health", "/page/nothing.js"])
def test_no_page_can_take_an_answer_for_a_script_or_an_image(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers.multi_items()
    assert headers.count(("x-content-type-options", "nosniff")) == 1
    assert headers.count(("cross-origin-resource-policy", "same-origin")) == 1
