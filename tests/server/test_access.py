"""Keys, origins, sizes, ids and unknown paths."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.running import Running, named, serving
from vllm_mlx.core.catalogue import Catalogue
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.server import run
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.util.tenants import unnamed_keys

from .fakes import FakeEngine

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    settings: Any = {"api_keys": ("first", "sécond"), "cors_origins": ("http://page",), "max_body_bytes": 1000}
    with serving(FakeEngine(), **settings) as running:
        yield running


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    detail: dict[str, Any] = body["error"]
    return detail


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first"},
        {"authorization": "bearer  first"},
        {"x-api-key": "first"},
        {"x-api-key": "sécond".encode()},
        {"authorization": "Bearer sécond".encode()},
    ],
)
def test_a_right_key_opens(guarded: Running, headers: Any) -> None:
    with guarded.http(headers=headers) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": ""}, {"x-api-key": "firs"}],
)
def test_no_other_key_does(guarded: Running, headers: Any) -> None:
    with guarded.http(headers=headers) as client:
        assert error(client.get("/v1/models"), 401)["code"] == "invalid_api_key"


def test_an_allowed_page_may_ask(guarded: Running) -> None:
    with guarded.http() as client:
        asked = {"origin": "http://page", "access-control-request-method": "POST"}
        wanted = {"access-control-request-headers": "authorization,content-type"}
        preflight = client.options("/v1/chat/completions", headers={**asked, **wanted})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page"
        refused = client.get("/v1/models", headers={"origin": "http://page"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page"
        other = client.get("/health", headers={"origin": "http://other"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


def test_without_origins_there_are_no_cors_headers(http: httpx.Client) -> None:
    answer = http.get("/health", headers={"origin": "http://page"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_body_beyond_the_limit_is_refused(guarded: Running) -> None:
    large = json.dumps({**CHAT, "user": "x" * 2000}).encode()
    headers = {"x-api-key": "first", "content-type": "application/json"}
    with guarded.http(headers=headers) as client:
        assert error(client.post("/v1/chat/completions", content=large), 413)["code"] == "request_too_large"
        undeclared = client.post("/v1/chat/completions", content=iter([large[:900], large[900:]]))
        assert error(undeclared, 413)["code"] == "request_too_large"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_methods_and_odd_bodies(http: httpx.Client) -> None:
    assert http.get("/v1/chat/completions").headers["allow"] == "POST"
    as_json = {"content-type": "application/json"}
    for content in (b'"text"', b"null", b"[" * 200_000, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        refused = error(http.post("/v1/chat/completions", content=content, headers=as_json), 400)
    assert "nested too deeply" in refused["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"],
)
def test_a_body_without_the_type_that_only_programs_may_send_is_refused(http: httpx.Client, path: str) -> None:
    """A web page of another site may send the types below to any address, and no JSON."""
    of_pages = ("", "text/plain", "text/plain; x=application/json", "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x", "application/x/+json", "text/json")  # fmt: skip
    for headers in ({}, *({"content-type": kind} for kind in of_pages)):
        answer = http.post(path, content=json.dumps(CHAT), headers=headers)
        assert answer.status_code == 400, headers
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.example+json"):
        answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": kind})
        assert answer.status_code == 200, kind


def test_the_request_id_comes_back(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(each.startswith("req_") for each in made)
    assert http.get("/health", headers={"x-request-id": 'x" y'}).headers["x-request-id"].startswith("req_")


def test_the_stream_s_headers(http: httpx.Client) -> None:
    headers = http.post("/v1/chat/completions", json={**CHAT, "stream": True}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-length" not in headers


def test_a_dead_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LAST_ERRORS_S", 60)
    with serving(FakeEngine(dead="Out of memory.")) as server, server.http() as client:
        assert client.get("/health").status_code == 503
        assert client.get("/health").json() == {"status": "error", "error": "Out of memory."}
        assert error(client.post("/v1/chat/completions", json=CHAT), 503)["code"] == "engine_dead"


def test_the_front_page_points_on(http: httpx.Client) -> None:
    assert http.get(http.get("/").json()["api"]).status_code == 200
    assert http.head("/").status_code == 200


def test_the_openapi_document_describes_bodies_and_replies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, body, reply in (
        ("/v1/chat/completions", "ChatCompletionBody", "ChatCompletion"),
        ("/v1/completions", "CompletionBody", "Completion"),
    ):
        post = document["paths"][path]["post"]
        asked = post["requestBody"]["content"]["application/json"]["schema"]
        forms = [form["$ref"].rpartition("/")[2] for form in asked.get("oneOf", [asked])]
        assert forms == ([body, "ResponsesAsChatBody"] if body == "ChatCompletionBody" else [body])
        contents = post["responses"]["200"]["content"]
        assert contents["application/json"]["schema"]["$ref"].endswith(f"/{reply}")
        assert "text/event-stream" in contents and "422" not in post["responses"]
        assert body in schemas and reply in schemas
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Catalogue(()),
        lambda: named(""),
        lambda: ServerConfig(models=named("a"), api_keys=unnamed_keys([""])),
    ],
)
def test_settings_that_cannot_serve(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/messages", "/v1/messages"),
        ("/chat/completions", "/v1/chat/completions"),
        ("//v1/responses", "/v1/responses"),
        ("/v1/v1/models", "/v1/models"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/v2/rerank", "/v1/rerank"),
        ("/v1/message", None),
        ("/elsewhere", None),
    ],
)
def test_a_base_url_that_is_slightly_wrong_is_told(server: Running, path: str, meant: str | None) -> None:
    answer = httpx.post(f"{server.url}{path}", json={}, trust_env=False)
    said = answer.json()["error"]["message"]
    assert answer.status_code == 404 and ("Did you mean" in said) == (meant is not None)
    assert meant is None or f"Did you mean {meant}?" in said
