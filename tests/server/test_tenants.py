"""Holders of different keys on one engine: nobody ends, clears or reads what is another's."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.async_engine import AsyncEngine

from .running import Running, eventually, serving

ASK: Any = {"input": "Tell me something that is long enough to be kept, please. " * 4, "max_output_tokens": 4}
ENDLESS: Any = {
    "messages": [{"role": "user", "content": "Go."}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def server(checkpoint: Any) -> Iterator[Running]:
    config = EngineConfig(model=str(checkpoint("qwen3")), max_model_len=4096, memory_budget_bytes=2 << 30)
    with serving(AsyncEngine.start(config), api_keys=("ann", "ben")) as running:
        yield running


@pytest.fixture
def ann(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "ann"}) as client:
        yield client


@pytest.fixture
def ben(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "ben"}) as client:
        yield client


def cached(client: httpx.Client) -> int:
    reply = client.post("/v1/responses", json=ASK).raise_for_status()
    return int(reply.json()["usage"]["input_tokens_details"]["cached_tokens"])


def test_a_holder_clears_what_is_cached_of_its_own_requests(ann: httpx.Client, ben: httpx.Client) -> None:
    assert (cached(ann), cached(ben)) == (0, 0)
    assert ben.delete("/v1/cache").json()["freed_bytes"] > 0
    assert cached(ann) > 0
    assert cached(ben) == 0


def test_a_holder_cancels_its_own_requests(server: Running, ann: httpx.Client, ben: httpx.Client) -> None:
    with ann.stream("POST", "/v1/chat/completions", json=ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        [request] = ben.get("/v1/status").json()["requests"]
        path = f"/v1/requests/{request['request_id']}/cancel"
        assert ben.post(path).status_code == 404
        with server.http(headers={"x-api-key": "ann"}) as beside:
            assert beside.post(path).status_code == 200
        assert any("request_cancelled" in line for line in lines)
    eventually(lambda: ben.get("/v1/status").json()["num_running"] == 0)


def test_a_stored_response_is_its_holder_s(ann: httpx.Client, ben: httpx.Client) -> None:
    path = f"/v1/responses/{ann.post('/v1/responses', json=ASK).json()['id']}"
    followed = ben.post("/v1/responses", json={**ASK, "previous_response_id": path.rpartition("/")[2]})
    assert followed.json()["error"]["code"] == "previous_response_not_found"
    looks = [ben.get(path), ben.get(f"{path}/input_items"), ben.post(f"{path}/cancel"), ben.delete(path)]
    assert [look.status_code for look in looks] == [404] * 4
    assert ann.get(path).status_code == 200
