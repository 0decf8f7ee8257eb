"""Watching a real engine over a socket: what the server says of a load agrees with what its clients saw."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running import Running, eventually, post_bytes, slowly
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.server.history import History

from .documents import documented_reply
from .watched import Seen, engine_served, load, watch

MAX_TOKENS = 60
MODEL = "qwen3"


def samples(http: httpx.Client) -> dict[str, float]:
    """By name and the labels that are not the model's."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[sample.name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))] = sample.value
    return found


def test_figures_agree_with_what_a_load_of_clients_saw(server: Running, http: httpx.Client) -> None:
    before, was = http.get("/v1/status").json(), samples(http)
    texts = [f"{number} is where this one begins, and then it goes on. " * 4 for number in range(6)]
    seen = [*load(server.url, texts, max_tokens=MAX_TOKENS), watch(server.url, texts[0], max_tokens=MAX_TOKENS)]
    after, now = http.get("/v1/status").json(), samples(http)

    def grew(name: str) -> float:
        return now[name] - was[name]

    prompt = sum(each.usage["prompt_tokens"] for each in seen)
    cached = sum(each.usage["prompt_tokens_details"]["cached_tokens"] for each in seen)
    assert cached > 0
    assert after["total_prompt_tokens"] - before["total_prompt_tokens"] == prompt == grew("vllm:prompt_tokens_total")
    assert after["total_completion_tokens"] - before["total_completion_tokens"] == MAX_TOKENS * len(seen)
    assert grew("vllm:generation_tokens_total") == MAX_TOKENS * len(seen)
    assert grew("vllm:prefix_cache_hits_total") == cached == grew("vllm:prompt_tokens_cached_total")
    assert grew("vllm_mlx_prefill_tokens_total") == prompt - cached
    assert grew("vllm:request_success_total finished_reason=length") == len(seen)
    assert after["outcomes"]["length"] - before["outcomes"]["length"] == len(seen)
    assert grew("vllm:time_to_first_token_seconds_count") == grew("vllm:e2e_request_latency_seconds_count") == len(seen)
    assert grew("vllm:request_queue_time_seconds_count") == len(seen)
    assert grew("vllm:inter_token_latency_seconds_count") == (MAX_TOKENS - 1) * len(seen)
    assert sum(grew(name) for name in now if name.startswith("vllm_mlx_cache_lookups_total")) == len(seen)

    # The server's clock starts a little later and stops a little earlier than a client's.
    outside = sum(each.ended_s - each.sent_s for each in seen)
    assert grew("vllm:inter_token_latency_seconds_sum") < grew("vllm:e2e_request_latency_seconds_sum") <= outside
    assert grew("vllm:time_to_first_token_seconds_sum") <= sum(each.ttft_s for each in seen)
    gaps = after["latency"]["inter_token_s"]
    assert 0 < gaps["p50"] <= gaps["p99"] <= gaps["max"] < outside


def test_who_comes_later_sees_the_last_minutes(server: Running, http: httpx.Client) -> None:
    watch(server.url, "Once upon a time.", max_tokens=MAX_TOKENS)

    def past() -> list[dict]:
        return documented_reply(http, "/v1/status/history")["data"]

    eventually(lambda: any(sample["generation_tps"] > 0 for sample in past()))
    last = next(sample for sample in past() if sample["generation_tps"] > 0)
    status = http.get("/v1/status").json()
    assert last["time"] < status["time"] < time.time() + 1
    assert 0 < last["inter_token_p50_s"] <= last["inter_token_p99_s"] and last["ttft_p50_s"] > 0


def test_what_is_kept_of_the_past_is_bounded(http: httpx.Client) -> None:
    history, status = History(every_s=2, span_s=10), http.get("/v1/status").json()
    for number in range(20):
        history.add(status, number)
    assert [sample["time"] for sample in history.told(0)["data"]] == [15, 16, 17, 18, 19]


def test_a_sample_that_fails_is_logged_and_the_next_one_is_taken(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    history, status = History(every_s=0.01), http.get("/v1/status").json()
    answers = iter([status, *[KeyError("latency")] * 3, status, EngineDead("it has ended"), status])

    async def ask() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def follow() -> None:
        async with history.following(ask):
            while len(history.told(0)["data"]) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)

    assert history.told(0)["age_s"] is None
    asyncio.run(asyncio.wait_for(follow(), 20))
    assert len(history.told(0)["data"]) == 2, "none is asked of an engine that has ended"
    assert caplog.text.count("It does not affect: the history") == 3
    assert history.told(history.told(0)["data"][-1]["time"] + 5)["age_s"] == 5


def test_parts_of_the_budget_add_up(http: httpx.Client) -> None:
    memory = http.get("/v1/status").json()["memory"]
    total = memory.pop("total_bytes")
    assert sum(memory.values()) == total
    assert memory["weights_bytes"] > 0 and memory["cache_bytes"] > 0


def test_what_is_served_is_told(http: httpx.Client) -> None:
    status = http.get("/v1/status").json()
    assert status["build"]["version"] and status["build"]["mlx"] and status["build"]["device"]
    facts = status["model_facts"]
    assert facts["resumes_anywhere"] and facts["bytes_per_token"] > 0 and facts["max_stall_ms"] == 200


def cancel_midway(server: Running, http: httpx.Client) -> Seen:
    seen = Seen()
    fields = {"max_tokens": 3000, "seen": seen}
    thread = threading.Thread(target=watch, args=(server.url, "a long one"), kwargs=fields)
    with slowly(server):
        thread.start()
        eventually(lambda: len(seen.arrivals_s) > 3)
        answer = http.post(f"/v1/requests/{seen.request_id}/cancel")
        thread.join(120)
    assert not thread.is_alive()
    assert answer.status_code == 200 and answer.json()["id"] == seen.request_id
    return seen


def test_a_request_can_be_cancelled_and_its_client_is_told(server: Running, http: httpx.Client) -> None:
    before = http.get("/v1/status").json()["outcomes"]["cancelled"]
    seen = cancel_midway(server, http)
    assert seen.error is not None and seen.error["code"] == "request_cancelled"
    assert 3 < len(seen.arrivals_s) < 3000
    eventually(lambda: http.get("/v1/status").json()["num_running"] == 0)
    status = http.get("/v1/status").json()
    assert status["outcomes"]["cancelled"] == before + 1
    assert (status["last_errors"][0]["code"], status["requests"]) == ("request_cancelled", [])
    again = http.post(f"/v1/requests/{seen.request_id}/cancel")
    assert again.status_code == 404 and seen.request_id in again.json()["error"]["message"]


def test_the_status_comes_as_a_stream_until_the_watcher_leaves(server: Running, http: httpx.Client) -> None:
    with http.stream("GET", "/v1/status/stream", params={"interval": 0.1}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert events[0]["uptime_s"] < events[2]["uptime_s"]
    assert events[0].keys() == http.get("/v1/status").json().keys()
    assert http.get("/v1/status/stream", params={"interval": 0}).status_code == 400


def test_prometheus_gets_vllm_s_names_whatever_it_prefers(http: httpx.Client) -> None:
    prefers = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    answer = http.get("/metrics", headers={"accept": prefers})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert '\nvllm:generation_tokens_total{engine="0",model_name=' in answer.text


def test_what_failed_lately_is_told_without_a_word_of_a_prompt(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "secret"}], "suffix": "x"})
    http.get("/favicon.ico")
    error = http.get("/v1/status").json()["last_errors"][0]
    assert (error["status"], error["path"]) == (400, "/v1/chat/completions")
    assert "suffix" in error["message"] and "secret" not in json.dumps(error)
    assert abs(error["time"] - time.time()) < 60


def test_each_request_names_its_client_without_control_characters(server: Running, http: httpx.Client) -> None:
    agent = "agent/1.0 (a\tb \x85c) " + "x" * 1000
    ask = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    named = {"user-agent": agent.encode("latin-1")}
    with slowly(server), http.stream("POST", "/v1/completions", json=ask, headers=named) as reply:
        lines = reply.iter_lines()  # its end would close the stream
        next(lines)
        with server.http() as beside:
            [running] = documented_reply(beside, "/v1/status")["requests"]
    assert running["path"] == "/v1/completions" and len(running["client"]) < 250
    assert running["client"].startswith("agent/1.0 (ab c) xxx") and running["client"].isprintable()
    http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1}, headers={"user-agent": "short"})
    http.post("/v1/completions", json={"prompt": 3}, headers={"user-agent": ""})
    status = documented_reply(http, "/v1/status")
    assert status["last_replies"][0]["client"] == "short"
    assert status["last_errors"][0]["client"] is None
    assert status["served_model_names"] == ["tiny", "alias"]


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 2}, {"prompt": ["Once", "Twice"], "stream": True}])
def test_a_reply_that_its_client_cut_is_told_with_what_was_written(
    server: Running, http: httpx.Client, fields: dict[str, Any]
) -> None:
    ask = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, **fields}
    whole = http.post("/v1/completions", json={**ask, "max_tokens": 4, "stream": False}).json()["usage"]
    before = http.get("/v1/status").json()["total_completion_tokens"]
    with slowly(server), server.connect() as connection:
        connection.sendall(post_bytes("/v1/completions", json.dumps(ask)))
        eventually(lambda: http.get("/v1/status").json()["total_completion_tokens"] > before + 4)
    eventually(lambda: http.get("/v1/status").json()["last_replies"][0]["finish"] == "left")
    status = documented_reply(http, "/v1/status")
    cut, complete = status["last_replies"][:2]
    assert (cut["prompt_tokens"], cut["path"]) == (whole["prompt_tokens"], "/v1/completions")
    assert cut["completion_tokens"] == status["total_completion_tokens"] - before > 4
    for reply, finish in ((cut, "left"), (complete, "length")):
        assert reply["finish"] == finish and 0 <= reply["ttft_s"] <= reply["duration_s"]
        assert reply["tokens_per_s"] >= (reply["completion_tokens"] - 1) / reply["duration_s"]
    assert all(error["status"] != 499 for error in status["last_errors"])


def test_a_watcher_without_the_key_is_no_error_of_the_server(checkpoint) -> None:
    with engine_served(checkpoint("qwen3"), options={"api_keys": ("right",)}) as running, running.http() as http:
        for path in ("/v1/status", "/v1/status/stream", "/v1/status/history", "/v1/cache", "/v1/models"):
            assert http.get(path).status_code == 401
        errors = http.get("/v1/status", headers={"x-api-key": "right"}).json()["last_errors"]
        assert [error["path"] for error in errors] == ["/v1/models"]


def test_a_watcher_does_not_hold_up_the_end_of_the_server(checkpoint) -> None:
    with engine_served(checkpoint("qwen3")) as running:
        watcher = running.connect()
        watcher.sendall(b"GET /v1/status/stream?interval=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in watcher.recv(100)
    rest = b"".join(iter(lambda: watcher.recv(65536), b""))
    assert b"event: error" in rest
    watcher.close()
