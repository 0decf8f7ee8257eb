"""Mixed load against a served checkpoint: every greedy reply is the one it gives alone, and nothing is left behind."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from tests.support.harm.heartbeat import Heartbeat
from tests.support.harm.vitals import Vitals
from tests.support.running import Running, eventually, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.server.run import freeze_garbage_collector

from .questions import PATIENCE_S

SAMPLE_S = 10.0  # from one look at the process's memory to the next
KEPT = ("num_preemptions", "shrinking", "outcomes", "total_requests_processed")


def mixed_load(options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        model=options.model,
        memory_budget_bytes=options.memory_mb << 20,
        max_model_len=2048,
        max_queue=64,
        max_pixels=1 << 16,
        max_prefill_chunk=512,
    )
    engine = start_engine(config)
    freeze_garbage_collector()
    with serving(engine, max_body_bytes=1_000_000, served_model_names=("demo",)) as server:
        return _soak(server, options) | asyncio.run(_inside(engine))


def _soak(server: Running, options: argparse.Namespace) -> dict[str, Any]:
    told = ("--minutes", str(options.minutes), "--clients", str(options.clients), "--seed", str(options.seed))
    load = subprocess.Popen([sys.executable, "-m", "scripts._soak.clients", server.url, *told], stdout=subprocess.PIPE)
    heart = Heartbeat(server.port, "none", patience_s=PATIENCE_S)
    heart.beat("health")
    memory_mb = [_memory_mb()]
    while True:
        try:
            tally = json.loads(load.communicate(timeout=SAMPLE_S)[0])
            break
        except subprocess.TimeoutExpired:
            memory_mb.append(_memory_mb())
    seen = heart.rest()
    heart.close()
    eventually(lambda: not server.server.server_state.tasks)
    with server.http() as http:
        status = http.get("/v1/status").json()
    return {
        "minutes": options.minutes,
        "requests": tally["done"],
        "refused": tally["refused"],
        "wrong": tally["wrong"] + seen.faults,
        "slowest_s": tally["slowest_s"],
        "health_ms": milliseconds(seen.health_s),
        "memory_mb": memory_mb[:: max(1, len(memory_mb) // 20)],
        **{name: status[name] for name in KEPT},
    }


async def _inside(engine: EngineClient) -> dict[str, Any]:
    """Return the engine's counts. Raise AssertionError if the cache is not sound or something was left behind."""

    def look(loaded: LLMEngine) -> dict[str, Any]:
        tree = loaded.cache_tree
        assert tree is not None
        tree.check_integrity()
        return {"rows": loaded.num_rows, "cache_entries": tree.stats.entry_count, "cache_bytes": tree.stats.used_bytes}

    for _ in range(500):  # the last aborts are handled between steps
        if await engine.ask(lambda asked: asked.num_rows) == 0:
            break
        await asyncio.sleep(0.02)
    found = await engine.ask(look)
    assert found["rows"] == 0, "rows are left on the device"
    return found


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return durations as a report shows them."""
    ordered = sorted(1000 * each for each in seconds) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * at))], 1) for name, at in places.items()}


def _memory_mb() -> int:
    """Return the memory of this process in MB."""
    return Vitals(os.getpid()).memory_bytes() >> 20
