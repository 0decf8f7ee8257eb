"""Models that leave memory and come back, over HTTP: states, commands, errors in each protocol's own form."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.protocols import PROTOCOLS
from tests.support.rows import cases
from tests.support.running import Running, eventually, slowly
from tests.support.unloading import hold_loads
from vllm_mlx.util.tenants import APIKey

from .watched import engine_served

USER, ADMIN = APIKey("ann", "a-secret"), APIKey("root", "r-secret", is_admin=True)
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
REQUESTS = {protocol.path: protocol.body("hi", max_tokens=4) for protocol in PROTOCOLS.values()}


@pytest.fixture
def path(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))


@pytest.fixture
def server(path: Path) -> Iterator[Running]:
    with engine_served(path, max_model_len=512) as running:
        yield running


def command(server: Running, name: str, **options: Any) -> Any:
    with server.http() as client:
        return client.post(f"/v1/models/tiny/{name}", **options)


def unload(server: Running) -> None:
    """What the last reply left may take a moment."""
    eventually(lambda: command(server, "unload", params={"wait": "true"}).status_code == 200)


def card(server: Running) -> dict[str, Any]:
    with server.http() as client:
        return dict(client.get("/v1/models").json()["data"][0])


def test_the_list_says_where_the_weights_are_and_a_request_brings_them_back(server: Running) -> None:
    assert (card(server)["state"], card(server)["status"]) == ("ready", {"value": "loaded"})
    for _ in range(2):
        unload(server)
        assert (card(server)["state"], card(server)["status"]) == ("unloaded", {"value": "unloaded"})
    with server.http() as client:
        [row] = client.get("/v1/status").json()["models"]
        assert (row["name"], row["state"], row["weights_bytes"]) == ("tiny", "unloaded", 0)
        assert 'vllm_mlx_model_state{model_name="' in client.get("/metrics").text
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        [row] = client.get("/v1/status").json()["models"]
    assert row["loads"] == {"start": 1, "request": 1, "command": 0}
    assert command(server, "load", params={"wait": "true"}).json()["state"] == "ready"


def test_a_load_answers_at_once_and_a_stream_is_kept_alive_until_it_is_done(path: Path) -> None:
    released = threading.Event()
    with engine_served(path, max_model_len=512, options={"keep_alive_s": 0.05}) as server:
        unload(server)
        asyncio.run(server.engine.ask(lambda engine: hold_loads(engine, released)))
        assert command(server, "load").json()["status"] == {"value": "loading"}
        with (
            server.http() as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply,
        ):
            lines = (line for line in reply.iter_lines() if line.startswith("data:"))
            assert [next(lines) for _ in range(4)], "the first one, and what keeps the connection alive"
            [request] = server.http().get("/v1/status").json()["requests"]
            assert (request["phase"], request["waits_for"]) == ("queued", "model")
            released.set()
            assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize("path_of", cases(REQUESTS, ["/v1/completions", "/v1/messages"]))
def test_a_failed_load_is_an_error_in_the_protocol_s_own_form(server: Running, path: Path, path_of: str) -> None:
    unload(server)
    path.rename(path.with_name("elsewhere"))
    with server.http() as client:
        assert client.post(path_of, json={}).status_code == 400, "an invalid request needs no model"
        for stream in (False, True):
            reply = client.post(path_of, json={**REQUESTS[path_of], "stream": stream})
            assert reply.status_code == 503 and 1 <= int(reply.headers["retry-after"]) <= 30
            error = reply.json()["error"]
            assert "no longer on disk. Put it back, or start the server with another model." in error["message"]
            assert error["type"] == ("overloaded_error" if path_of == "/v1/messages" else error["type"])
        assert client.post("/v1/models/tiny/load", params={"wait": "true"}).status_code == 503
        assert (card(server)["state"], card(server)["status"]["value"]) == ("failed", "failed")
        assert client.get("/health").status_code == 200
        path.with_name("elsewhere").rename(path)
        assert client.post("/v1/models/tiny/load", params={"wait": "true"}).json()["state"] == "ready"
        assert client.post(path_of, json=REQUESTS[path_of]).status_code == 200


def test_a_model_in_use_stays_and_the_answer_names_what_uses_it(path: Path) -> None:
    long = {**CHAT, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with engine_served(path, max_model_len=4096) as server:
        with (
            slowly(server),
            server.http() as client,
            client.stream("POST", "/v1/chat/completions", json=long) as reply,
        ):
            lines = reply.iter_lines()
            first = next(lines)
            refused = command(server, "unload")
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert error["code"] == "model_busy" and json.loads(first.removeprefix("data:"))["id"] in error["message"]
        unload(server)


def test_only_administrators_load_and_unload(path: Path) -> None:
    with engine_served(path, max_model_len=512, options={"api_keys": (USER, ADMIN)}) as server:
        for name in ("unload", "load"):
            statuses = [
                command(server, name, headers={"x-api-key": key.secret} if key else {}).status_code
                for key in (None, USER, ADMIN)
            ]
            assert statuses == [401, 403, 200]
    with engine_served(path, max_model_len=512) as server:
        assert command(server, "load", headers={"x-forwarded-for": "192.168.1.9"}).status_code == 403
        with server.http() as client:
            assert client.post("/v1/models/other/load").json()["error"]["code"] == "model_not_found"


def test_wired_weights_stay(path: Path) -> None:
    with engine_served(path, max_model_len=512, wired="weights") as server:
        refused = command(server, "unload")
        assert refused.status_code == 409 and "restart the Mac" in refused.json()["error"]["message"]
