"""Puts a server under load for as long as asked, and prints the results. Its exit code is 1 if something was wrong.

mixed: clients of every kind against a small budget; every greedy reply is the one it gives alone. kills: kill -9 under
load, again and again; the next start gives the same replies, and no file is left over. connections: a thousand that
idle or drip, beside hundreds that ask. hostile: two keys, of which one fills whatever can be filled, and how long the
other waits.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from scripts.served import CHAT, Server, serving
from tests.support import running
from tests.support.harm.heartbeat import HEALTH, Heartbeat, Seen
from tests.support.harm.vitals import Vitals
from tests.support.integrity import check_integrity
from tests.support.running import Running, eventually
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.server.connection import allow_open_files
from vllm_mlx.server.run import freeze_garbage_collector

from .clients import PATIENCE_S, QUESTIONS, ask, greedy, said, user
from .hostile import hostile_key

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
    with running.serving(engine, max_body_bytes=1_000_000, served_model_names=("demo",)) as server:
        return _soak(server, options) | asyncio.run(_inside(engine))


def _soak(server: Running, options: argparse.Namespace) -> dict[str, Any]:
    told = json.dumps({**vars(options), "url": server.url})
    load = subprocess.Popen([sys.executable, "-m", "scripts._soak.clients", told], stdout=subprocess.PIPE)
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
        check_integrity(tree)
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


CLIENTS = 4
LONGEST_S = 4.0  # from the first requests to the kill
KERNELS = "mlx"
ASKED = ("france", "circle", "tools")  # of each start


def many_kills(options: argparse.Namespace) -> dict[str, Any]:
    chance, wrong, port = random.Random(options.seed), [], 0
    expected: dict[str, Any] = {}
    starts_s, num_broken = [], 0
    with _temporary() as folder:
        for number in range(options.times):
            started_s = time.monotonic()
            with serving(None, options.model, port=port, variables={"TMPDIR": str(folder)}) as server:
                starts_s.append(round(time.monotonic() - started_s, 1))
                for name in ASKED:
                    found = said(server.post(CHAT, QUESTIONS[name])["choices"])
                    if found != expected.setdefault(name, found):
                        wrong.append(f"start {number}, {name}: {found} instead of {expected[name]}")
                num_broken += _kill_under_load(server, chance)
            wrong += [f"start {number} left {path}" for path in folder.iterdir() if path.name != KERNELS]
            port = server.port  # the same again: it must be free
            print(f"{number + 1} kills, {num_broken} requests broken, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {"kills": options.times, "requests_broken": num_broken, "longest_start_s": max(starts_s), "wrong": wrong}


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """Make an empty temporary folder for servers, with the kernels that MLX has compiled on this machine before."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KERNELS).symlink_to(Path(tempfile.gettempdir()) / KERNELS)
        yield Path(folder)


def _kill_under_load(server: Server, chance: random.Random) -> int:
    """Kill the server under load. Return the number of requests that broke."""
    broken: list[str] = []
    seeds = [chance.random() for _ in range(CLIENTS)]
    threads = [threading.Thread(target=_ask_until_broken, args=(server, random.Random(seed), broken)) for seed in seeds]
    for thread in threads:
        thread.start()
    time.sleep(chance.uniform(0, LONGEST_S))
    server.kill()
    for thread in threads:
        thread.join()
    return len(broken)


def _ask_until_broken(server: Server, chance: random.Random, broken: list[str]) -> None:
    with contextlib.suppress(httpx.ConnectError):
        while not broken:
            name = chance.choice(list(QUESTIONS))
            try:
                server.answer(CHAT, {**QUESTIONS[name], "stream": chance.random() < 0.5})
            except (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
                broken.append(name)


DRIP_S = 5.0
LONG = greedy(user("The fox sees the river and the hill. " * 20), max_tokens=24, stream=True)


def many_connections(options: argparse.Namespace) -> dict[str, Any]:
    allow_open_files()
    room = str(options.idle + options.active + 100)
    with serving(None, options.model, "--max-connections", room, "--max-queue", room) as server:
        num, seen = asyncio.run(_crowd(server.port, options))
    return {
        "minutes": options.minutes,
        "connections": dict(num),
        "health_ms": milliseconds(seen.health_s),
        "ttft_beside_load_ms": milliseconds(seen.ttft_s),
        "short_requests": len(seen.ttft_s),
        "wrong": seen.faults,
    }


async def _crowd(port: int, options: argparse.Namespace) -> tuple[Counter[str], Seen]:
    tally: Counter[str] = Counter()
    crowd = [_visit_forever(_idle, port, tally) for _ in range(options.idle // 2)]
    crowd += [_visit_forever(_drip, port, tally) for _ in range(options.idle - options.idle // 2)]
    crowd += [_visit_forever(_load, port, tally) for _ in range(options.active)]
    tasks = [asyncio.create_task(each) for each in crowd]
    await asyncio.sleep(min(5.0, 10 * options.minutes))  # for all to be there
    heart = Heartbeat(port, "none", patience_s=PATIENCE_S)
    heart.beat("health", "chat")
    await asyncio.sleep(60 * options.minutes)
    seen = await asyncio.to_thread(heart.rest)
    heart.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tally, seen


async def _visit_forever(visit: Any, port: int, tally: Counter[str]) -> None:
    while True:
        try:
            await visit(port, tally)
        except OSError as error:
            tally[f"{visit.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(1)


async def _idle(port: int, tally: Counter[str]) -> None:
    """Send one request, then nothing until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH)
    if b"200" in await reader.readline():
        tally["idle"] += 1
        await reader.read()
    writer.close()


async def _drip(port: int, tally: Counter[str]) -> None:
    """Send a header that never ends, a byte at a time, until the server refuses it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH[:-2] + b"X-Slow: ")
    tally["slow"] += 1
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        writer.write(b"x")
        await asyncio.wait({answer}, timeout=DRIP_S)
    tally["slow, refused with 408"] += b"408" in answer.result()
    writer.close()


async def _load(port: int, tally: Counter[str]) -> None:
    tally[f"active, {await ask(port, LONG)}"] += 1


PARTS = {"mixed": mixed_load, "kills": many_kills, "connections": many_connections, "hostile": hostile_key}


def main() -> int:
    options = _options()
    report = PARTS[options.part](options)
    print(json.dumps({**report, "machine_load": [round(each, 1) for each in os.getloadavg()]}, indent=1))
    return 1 if report["wrong"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, default="mixed", help="the load (default: mixed)")
    parser.add_argument("--minutes", type=float, default=60, help="all but kills: how long (default: 60)")
    parser.add_argument("--times", type=int, default=50, help="kills: how often (default: 50)")
    parser.add_argument("--clients", type=int, default=8, help="mixed: at once (default: 8)")
    parser.add_argument("--active", type=int, default=200, help="connections: that ask at once (default: 200)")
    parser.add_argument("--idle", type=int, default=1000, help="connections: that idle or drip (default: 1000)")
    parser.add_argument("--memory-mb", type=int, default=64, help="mixed: budget of the server (default: 64)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is drawn; give each part of a long run another seed"
    )
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
