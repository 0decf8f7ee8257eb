"""Five models share room for two: many requests at once, in four protocols, and every reply is as alone."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from tests.support.running import slowly
from tests.support.tight_models import BUDGET, MODELS, PATHS, Asked, Watch, served
from vllm_mlx.cli.remote import events_of

AT_ONCE = 16


def kinds(num_texts: int) -> list[Asked]:
    return [Asked(*kind) for kind in product(MODELS, PATHS, range(num_texts))]


def check(num_requests: int, most_loads: int, alone: dict[Asked, Any]) -> None:
    """Without replies `alone`, each is asked alone before."""
    asked = random.Random(5).choices(list(alone), k=num_requests)
    watch, before_bytes = Watch(), mx.get_active_memory()
    with served(*MODELS) as server, server.http() as client, ThreadPoolExecutor(AT_ONCE) as pool:
        alone = {one: reply or one.ask(client) for one, reply in alone.items()}
        num_before = sum(row["loads"]["request"] for row in client.get("/v1/status").json()["models"])
        asyncio.run(server.engine.ask(watch.begin))
        replies = list(pool.map(lambda one: one.ask(client), asked))
        status = client.get("/v1/status").json()
    assert replies == [alone[one] for one in asked]
    assert status["outcomes"]["failed"] == status["outcomes"]["aborted"] == 0
    assert watch.num_preempted == status["num_restarts"] == 0
    assert watch.most_bytes <= BUDGET and watch.most_active_bytes <= before_bytes + BUDGET
    num_loads = sum(row["loads"]["request"] for row in status["models"]) - num_before
    assert len(MODELS) - 2 <= num_loads <= most_loads
    assert watch.most_loads <= 2 * len(MODELS)


@pytest.mark.full  # with every run: models that do not fit take turns, in tests/engine
def test_many_requests_in_random_order() -> None:
    check(16, 20, {one: None for one in kinds(1) if one.path in PATHS[::3]})


@pytest.mark.full
def test_five_hundred_requests_in_random_order() -> None:
    alone: dict[Asked, Any] = {}
    for name in MODELS:
        with served(name) as server, server.http() as client:
            alone |= {one: one.ask(client) for one in kinds(5) if one.model == name}
    check(500, 100, alone)


def test_who_waits_too_long_for_room_learns_what_is_in_the_way() -> None:
    names, long = ("attention", "hybrid"), {"prompt": "hi", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with (
        served(*names, memory_budget_bytes=16_000_000, max_model_wait_s=0.3) as server,
        server.http() as client,
        ThreadPoolExecutor(8) as pool,
        ExitStack() as stack,
    ):
        bodies = [
            (path, {**Asked("hybrid", path, 0).body, "stream": is_stream})
            for path in PATHS
            for is_stream in (False, True)
        ]
        with slowly(server, 0.5):
            running = client.stream("POST", "/v1/completions", json={**long, "model": "attention"})
            events = events_of(stack.enter_context(running).iter_lines())
            first = next(events)
            refused = server.http().post("/v1/models/hybrid/load")
            answers = list(pool.map(lambda asked: server.http().post(asked[0], json=asked[1]), bodies))
        assert refused.status_code == 503
        assert "do not fit together with attention. Wait until" in refused.json()["error"]["message"]
        for (path, body), answer in zip(bodies, answers, strict=True):
            if body["stream"] and answer.status_code == 200:  # it had begun before the wait was over
                *_, told = events_of(answer.text.splitlines())
                error = told["response"]["error"] if "response" in told else told["error"]
            else:
                assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                error = answer.json()["error"]
            assert "no room in memory for 0.3 seconds (--max-model-wait-s). In memory: attention" in error["message"]
            assert f"attention, which runs {first['id']}." in error["message"]
            assert path != "/v1/messages" or error["type"] == "overloaded_error"
        assert [event["choices"][0]["finish_reason"] for event in (first, *events)][-1] == "length"
        body = Asked("hybrid", "/v1/completions", 0).body
        assert server.http().post("/v1/completions", json=body).status_code == 200
        status = server.http().get("/v1/status").json()
        assert [row["state"] for row in status["models"]] == ["unloaded", "ready"]
        assert status["outcomes"]["length"] == 2 and status["num_preemptions"] == 0
