"""A client beside a load: `/health` and, if asked, a short request, again and again. Prints the seconds as JSON.

It is another process than the load, whose work would be counted as the server's time.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from .questions import CHAT, greedy, user

ASK_S = 0.2  # between two looks at how it goes
FIRST_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning)":"[^"]')
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = greedy(user("What is 2 + 3?"), max_tokens=4, stream=True)


@dataclass
class Seen:
    health_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def start_probe(port: int, minutes: float, *, short: bool = False) -> subprocess.Popen[bytes]:
    told = [str(port), "--minutes", str(minutes), *(["--short"] if short else [])]
    return subprocess.Popen([sys.executable, "-m", "scripts._soak.probe", *told], stdout=subprocess.PIPE)


def seen_by(probe: subprocess.Popen[bytes]) -> Seen:
    """Wait for the end of the probe."""
    return Seen(**json.loads(probe.communicate()[0]))


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return durations as a report shows them."""
    ordered = sorted(1000 * each for each in seconds) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * at))], 1) for name, at in places.items()}


async def ask(port: int, body: dict[str, Any]) -> tuple[int, float | None]:
    """Return the status, and the seconds to the first text of a reply, which is read to its end."""
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


async def _ask_short(port: int, seen: Seen, until_s: float) -> None:
    while time.monotonic() < until_s:
        status, ttft_s = await ask(port, SHORT)
        if status == 200 and ttft_s is not None:
            seen.ttft_s.append(ttft_s)
        else:
            seen.wrong.append(f"short request: {status}")
        await asyncio.sleep(ASK_S)


async def _look(port: int, seen: Seen, until_s: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        writer.write(HEALTH)
        status = await reader.readline()
        await reader.readuntil(b"}")
        seen.health_s.append(time.monotonic() - started_s)
        if b"200" not in status:
            seen.wrong.append(f"health: {status!r}")
        await asyncio.sleep(ASK_S)
    writer.close()


async def _probe(port: int, minutes: float, short: bool) -> Seen:
    seen, until_s = Seen(), time.monotonic() + 60 * minutes
    tasks = [_look(port, seen, until_s)] + ([_ask_short(port, seen, until_s)] if short else [])
    await asyncio.gather(*tasks)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--short", action="store_true", help="also send short requests")
    options = parser.parse_args()
    print(json.dumps(vars(asyncio.run(_probe(options.port, options.minutes, options.short)))))


if __name__ == "__main__":
    main()
