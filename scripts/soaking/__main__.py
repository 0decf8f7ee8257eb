"""Mixed load against a served checkpoint: every greedy reply is the one it gives alone, and nothing is left behind."""

import argparse
import asyncio
import json
import resource
import sys
import threading
import time
from typing import Any

from tests.server.running import Running, eventually, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.async_engine import AsyncEngine
from vllm_mlx.engine.engine import Engine

from .load import PROMPTS, Client, Tally, oracle


def main() -> int:
    options = _options()
    config = EngineConfig(
        model=options.model, memory_budget_bytes=options.memory_mb << 20, max_model_len=2048, max_queue=64
    )
    engine = AsyncEngine.start(config)
    with serving(engine, max_body_bytes=1_000_000, served_model_names=("demo",)) as server:
        report = _soak(server, options)
        report |= asyncio.run(_inside(engine))
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


def _soak(server: Running, options: argparse.Namespace) -> dict[str, Any]:
    oracles = {prompt: oracle(server.url, prompt) for prompt in PROMPTS}
    tally, until_s = Tally(), time.monotonic() + 60 * options.minutes
    clients = [Client(server.url, oracles, tally, options.seed + number) for number in range(options.clients)]
    threads = [threading.Thread(target=client.run, args=(until_s,)) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(min(30, 20 * options.minutes))
    warm_mb = _peak_mb()
    for thread in threads:
        thread.join()
    eventually(lambda: not server.server.server_state.tasks)
    health_ms = sorted(1000 * seconds for seconds in tally.health_s) or [0.0]
    return {
        "minutes": options.minutes,
        "requests": dict(tally.done),
        "wrong": tally.wrong,
        "health_ms": {"p50": round(health_ms[len(health_ms) // 2], 1), "max": round(health_ms[-1], 1)},
        "peak_mb": {"warm": warm_mb, "end": _peak_mb()},
    }


async def _inside(engine: AsyncEngine) -> dict[str, Any]:
    """Raises AssertionError where the cache is not sound or something was left behind."""

    def look(loaded: Engine) -> dict[str, Any]:
        tree = loaded.cache_tree
        assert tree is not None
        tree.check_integrity()
        return {"rows": loaded.num_rows, "cache_entries": tree.stats.entry_count, "cache_bytes": tree.stats.used_bytes}

    for _ in range(500):  # the last aborts are handled between steps
        if await engine.num_rows() == 0:
            break
        await asyncio.sleep(0.02)
    found = await asyncio.wrap_future(engine._thread.inspect(look))
    assert found["rows"] == 0, "rows are left on the device"
    return found


def _peak_mb() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--clients", type=int, default=6, help="at once (default: 6)")
    parser.add_argument("--memory-mb", type=int, default=256, help="budget of the server (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="another part of a long run takes another one")
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
