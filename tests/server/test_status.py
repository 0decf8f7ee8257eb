"""`/v1/status` and `/v1/cache` over a real engine: the names monitors read, and figures that agree with the replies."""

import ctypes
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.promised import PROMISED, check_types
from tests.support.rows import row
from tests.support.running import Running, eventually, slowly, start_python
from vllm_mlx.server import log

from .documents import documented_reply
from .watched import engine_served

API = Path(__file__).parents[2] / "docs/api.md"
NAMES = PROMISED["S4-32"]


@pytest.fixture(scope="module")
def running(checkpoint):
    with engine_served(checkpoint("qwen3")) as running:
        yield running


@pytest.fixture
def server(running):
    """Nothing is cached yet."""
    with running.http() as client:
        client.delete("/v1/cache")
        yield client


def ask(client: httpx.Client, text: str, **fields) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "temperature": 0, **fields}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@row("S4-5", "S4-32")
def test_an_idle_server_has_every_field(server):
    status = server.get("/v1/status").json()
    check_types(status, NAMES["server"])
    check_types(status["cache"], NAMES["cache"])
    assert status["status"] == "idle"
    assert status["requests"] == []
    assert set(status["metal"]) == {*NAMES["metal"], "limit_memory_gb"}
    assert set(status["system"]) == {"process_memory_gb", "pressure"}


def has_trim() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def test_the_parts_of_the_process_add_up(server):
    ask(server, "hello there")
    parts = documented_reply(server, "/v1/status")["process"]
    total = parts.pop("total_bytes")
    if total is None:
        pytest.skip("the system does not report the memory of a process")
    assert total > parts["mlx_active_bytes"] > 0 and parts["replies_bytes"] > 0
    assert sum(parts.values()) == total


FREED = """
import asyncio, ctypes, sys
from pathlib import Path
from tests.support.checkpoints import checkpoint
from tests.support.running import eventually
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.engine.macos import resident_bytes

start_engine(EngineConfig(model=str(checkpoint("qwen3")), memory_budget_bytes=2 << 30))
before = resident_bytes()
kept = [bytes(60_000) for _ in range(3_000)]  # below the size from which the allocator maps each one alone
held = kept[-1]  # which lies above the others, so that the allocator cannot return them by itself
del kept
assert resident_bytes() - before > 100_000_000
eventually(lambda: resident_bytes() - before < 30_000_000)
print("returned")
"""


@pytest.mark.full
@pytest.mark.skipif(not has_trim(), reason="the C library returns no freed memory when it is asked")
def test_an_idle_engine_returns_freed_memory_to_the_system():
    process = start_python(FREED)
    out, err = process.communicate(timeout=300)
    assert "returned" in out, err[-2000:]


def test_the_document_lists_every_field_of_an_idle_server(server):
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    status = documented_reply(server, "/v1/status")
    assert schemas["ServerStatus"]["properties"].keys() == status.keys() | {"ranks"}, "one Mac has no list of Macs"
    assert set(schemas["ServerStatus"]["required"]) == status.keys()
    assert schemas["CacheStatus"]["properties"].keys() == status["cache"].keys()
    assert {"request_id", "progress", "why_not_cached"} <= schemas["ReplyProgress"]["properties"].keys()
    assert "tenant" not in schemas["ReplyProgress"]["properties"]


def test_the_page_of_the_api_names_every_field(server):
    watching = API.read_text(encoding="utf-8").partition("## Watching")[2].partition("###")[0]
    fields = server.get("/openapi.json").json()["components"]["schemas"]["ServerStatus"]["properties"].keys()
    assert fields <= set(re.findall("`([a-z_]+)`", watching))


def test_the_document_fits_a_server_without_a_prefix_cache(checkpoint):
    with engine_served(checkpoint("qwen3"), prefix_cache=False) as running, running.http() as client:
        assert documented_reply(client, "/v1/status")["cache"]["enabled"] is False
        assert documented_reply(client, "/v1/cache")["data"] == []


@row("S4-32")
def test_a_request_under_way_is_shown(server, running):
    body = {"prompt": "hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
    with slowly(running), server.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
        status = documented_reply(server, "/v1/status")
        assert status["status"] == "running"
        [request] = status["requests"]
        check_types(request, NAMES["request"])
        assert request["phase"] == "generation"
        assert 0 < request["progress"] < 1
        assert request["ttft_s"] > 0
        assert request["cache_hit_type"] == "miss"
        assert status["num_running"] == 1


@pytest.fixture
def narrow(checkpoint):
    """A server with one place, which reads prompts in small chunks."""
    with engine_served(checkpoint("qwen3"), max_num_seqs=1, max_prefill_chunk=16) as running:
        yield running


@row("S0-20", "S4-32")
def test_a_prompt_that_is_read_and_one_that_waits(narrow, monkeypatch, caplog):
    """On the wire and in the log: how far a long prompt is, and no kind of hit before the prompt is looked up."""
    caplog.set_level(logging.INFO, logger="vllm_mlx.requests")
    monkeypatch.setattr(log, "PROGRESS_EVERY_S", 0.0)
    reading, waiting = [], []
    with ThreadPoolExecutor() as pool, narrow.http() as client:
        with slowly(narrow, 0.6):
            asked = [pool.submit(ask, client, f"{number} " + "a long prompt " * 150) for number in range(2)]
            while not waiting or len({request["progress"] for request in reading}) < 2:
                seen = client.get("/v1/status").json()["requests"]
                reading += [request for request in seen if request["phase"] == "prefill"]
                waiting += [request for request in seen if request["phase"] == "queued" and request["prompt_tokens"]]
        usages = [each.result()["usage"] for each in asked]
    assert {request["cache_hit_type"] for request in reading} <= {"miss", "lcp"}
    assert all(0 <= request["progress"] < 1 for request in reading)
    assert all(request["status"] == "waiting" and request["progress"] == 0 for request in waiting)
    assert {request["cache_hit_type"] for request in waiting} == {None}
    assert {"generation", *(request["phase"] for request in (*reading, *waiting))} == set(NAMES["phases"])
    eventually(lambda: len(re.findall(r"hit=\w+ cache_mb=\d+\.\d/\d+\.\d ", caplog.text)) == 2)
    for usage in usages:
        done = [int(share) for share in re.findall(rf"prefill=(\d+)/{usage['prompt_tokens']} ", caplog.text)]
        assert len(done) > 3 and all(share < usage["prompt_tokens"] for share in done)


@row("S4-32")
def test_each_kind_of_hit_on_the_wire_and_in_the_log(server, running, caplog):
    caplog.set_level(logging.INFO, logger="vllm_mlx.requests")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"] * 4
    begun = " ".join(words)
    prompts = (begun, begun, " ".join(words[:25]), " ".join([*words[:25], "on"]))
    kinds = [hit_kind(server, running, text) for text in prompts]
    server.post("/v1/completions", json={"prompt": "red and blue and green", "max_tokens": 1})
    kinds.append(hit_kind(server, running, "red and blue and green or white"))
    assert kinds == ["miss", "exact", "supersequence", "lcp", "prefix"]
    assert set(kinds) == set(NAMES["hits"])
    kinds.insert(4, "miss")
    eventually(lambda: re.findall(r"hit=(\w+)", caplog.text) == kinds)


def hit_kind(client: httpx.Client, running: Running, prompt: str) -> str:
    """What the status says of the request while it decodes."""
    body = {"prompt": prompt, "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
    with slowly(running), client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        [request] = client.get("/v1/status").json()["requests"]
    eventually(lambda: not client.get("/v1/status").json()["requests"])
    return request["cache_hit_type"]


@row("S0-13")
def test_snapshots_of_recurrent_state_are_counted(checkpoint):
    with engine_served(checkpoint("qwen3_5")) as running, running.http() as client:

        def states() -> list[int]:
            return [entry["state_bytes"] for entry in client.get("/v1/cache").json()["data"] if entry["state_bytes"]]

        def num_states() -> int:
            return client.get("/v1/status").json()["cache"]["num_states"]

        sizes = set()
        for text in ("hello there", "hello there, this is a question", "another one"):
            ask(client, text)
            eventually(lambda: not client.get("/v1/status").json()["num_running"])
            eventually(lambda: num_states() == len(states()) > 0)  # a reply's last states are settled after it
            sizes |= set(states())
        assert len(sizes) == 1, "each takes the same"
        client.delete("/v1/cache")
        assert num_states() == 0


def test_the_cache_can_be_seen_and_cleared(server):
    ask(server, "hello there, this is a question")
    seen = documented_reply(server, "/v1/cache")
    assert len(seen["data"]) > 0
    assert sum(entry["segment_bytes"] for entry in seen["data"]) > 0
    assert {entry["parent_id"] for entry in seen["data"]} <= {None, *(entry["node_id"] for entry in seen["data"])}
    assert server.delete("/v1/cache").json()["freed_bytes"] > 0
    assert server.get("/v1/cache").json()["data"] == []
    usage = ask(server, "hello there, this is a question")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
