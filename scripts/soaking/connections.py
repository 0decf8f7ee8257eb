"""A thousand connections that idle or drip, beside hundreds that ask: how long the others wait, and what is let go."""

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cli.serving import address, served
from vllm_mlx.server.connection import allow_open_files

from .figures import milliseconds
from .questions import CHAT, greedy, user

DRIP_S = 5.0
ASK_S = 0.5  # between two looks at how it goes
FIRST_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning)":"[^"]')
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = greedy(user("What is 2 + 3?"), max_tokens=4, stream=True)
LONG = greedy(user("The fox sees the river and the hill. " * 20), max_tokens=24, stream=True)


@dataclass
class Tally:
    num: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def many_connections(options: argparse.Namespace) -> dict[str, Any]:
    allow_open_files()
    room = str(options.idle + options.active + 100)
    limits = ("--max-connections", room, "--max-queue", room, "--log-level", "warning")
    with served(options.model, *limits) as (_, printed):
        tally = asyncio.run(_crowd(httpx.URL(address(printed)).port or 80, options))
    return {
        "minutes": options.minutes,
        "connections": dict(tally.num),
        "health_ms": milliseconds(tally.health_s),
        "ttft_beside_load_ms": milliseconds(tally.ttft_s),
        "short_requests": len(tally.ttft_s),
        "wrong": tally.wrong,
    }


async def _crowd(port: int, options: argparse.Namespace) -> Tally:
    tally = Tally()
    crowd = [_forever(_idle, port, tally) for _ in range(options.idle // 2)]
    crowd += [_forever(_drip, port, tally) for _ in range(options.idle - options.idle // 2)]
    crowd += [_forever(_load, port, tally) for _ in range(options.active)]
    tasks = [asyncio.create_task(each) for each in crowd]
    await asyncio.sleep(min(5.0, 10 * options.minutes))  # for all to be there
    until_s = time.monotonic() + 60 * options.minutes
    await asyncio.gather(_look(port, tally, until_s), _probe(port, tally, until_s))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tally


async def _forever(visit: Any, port: int, tally: Tally) -> None:
    while True:
        try:
            await visit(port, tally)
        except OSError as error:
            tally.num[f"{visit.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(1)


async def _idle(port: int, tally: Tally) -> None:
    """One request, then nothing until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH)
    if b"200" in await reader.readline():
        tally.num["idle"] += 1
        await reader.read()
    writer.close()


async def _drip(port: int, tally: Tally) -> None:
    """A header that never ends, a byte at a time, until the server refuses it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH[:-2] + b"X-Slow: ")
    tally.num["slow"] += 1
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        writer.write(b"x")
        await asyncio.wait({answer}, timeout=DRIP_S)
    tally.num["slow, refused with 408"] += b"408" in answer.result()
    writer.close()


async def _load(port: int, tally: Tally) -> None:
    status, _ = await _ask(port, LONG)
    tally.num[f"active, {status}"] += 1


async def _probe(port: int, tally: Tally, until_s: float) -> None:
    while time.monotonic() < until_s:
        status, ttft_s = await _ask(port, SHORT)
        if status == 200 and ttft_s is not None:
            tally.ttft_s.append(ttft_s)
        else:
            tally.wrong.append(f"short request: {status}")
        await asyncio.sleep(ASK_S)


async def _look(port: int, tally: Tally, until_s: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        writer.write(HEALTH)
        status = await reader.readline()
        await reader.readuntil(b"}")
        tally.health_s.append(time.monotonic() - started_s)
        if b"200" not in status:
            tally.wrong.append(f"health: {status!r}")
        await asyncio.sleep(ASK_S)
    writer.close()


async def _ask(port: int, body: dict[str, Any]) -> tuple[int, float | None]:
    """The status, and the seconds to the first text of a reply, which is read to its end."""
    data = json.dumps(body).encode()
    started_s, ttft_s, seen = time.monotonic(), None, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    while part := await reader.read(65536):
        seen += part
        if ttft_s is None and FIRST_TEXT.search(seen):
            ttft_s = time.monotonic() - started_s
    writer.close()
    return int(seen.split(None, 2)[1]) if seen else 0, ttft_s
