"""A thousand idle or slow connections beside hundreds that ask: how long requests wait, and what is closed."""

import argparse
import asyncio
from collections import Counter
from typing import Any

import httpx

from tests.support.commands import address, served
from tests.support.harm.heartbeat import HEALTH, Heartbeat, Seen
from vllm_mlx.server.connection import allow_open_files

from .mixed import milliseconds
from .questions import PATIENCE_S, ask, greedy, user

DRIP_S = 5.0
LONG = greedy(user("The fox sees the river and the hill. " * 20), max_tokens=24, stream=True)


def many_connections(options: argparse.Namespace) -> dict[str, Any]:
    allow_open_files()
    room = str(options.idle + options.active + 100)
    limits = ("--max-connections", room, "--max-queue", room, "--log-level", "warning")
    with served(options.model, *limits) as (_, printed):
        num, seen = asyncio.run(_crowd(httpx.URL(address(printed)).port or 80, options))
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
    crowd = [_forever(_idle, port, tally) for _ in range(options.idle // 2)]
    crowd += [_forever(_drip, port, tally) for _ in range(options.idle - options.idle // 2)]
    crowd += [_forever(_load, port, tally) for _ in range(options.active)]
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


async def _forever(visit: Any, port: int, tally: Counter[str]) -> None:
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
