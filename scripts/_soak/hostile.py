"""Two keys, one of them hostile: how long the other's chat waits for its first token, alone and beside each hostility.

Both are measured in turns, since other work on the machine comes and goes. The server has four places: every row of a
batch makes each step longer, on a CPU in proportion, and that would hide what the sharing between keys does.
"""

import argparse
import asyncio
import base64
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from scripts.served import CHAT
from tests.media.pdf_samples import pdf
from tests.support.harm.driver import Driver
from tests.support.harm.heartbeat import Heartbeat, Seen
from tests.support.harm.media import blank_png
from tests.support.harm.schemas import alternatives
from tests.support.harm.target import ATTACKER, OTHER, target
from tests.support.harm.values import dumps
from tests.support.harm.wire import request

from .clients import Body, ask, user

MOST_RATIO = 2.0  # of the time to the first token beside a hostile client to that alone
PHASE_S = 8.0
LEAST_TURNS = 2
CHAT_BYTES = 100_000  # of the other's bodies: short ones find room whatever others hold
MAX_BODY = 16 << 20
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b" | '
SHARES = (0.5, 0.9)
HEAD = {
    "chats": "alone, beside",
    "refused": "refused",
    "alone": "alone ms p50, p90",
    "beside": "beside ms",
    "ratio": "ratio",
}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Hostility:
    """`num` clients that do the same again and again."""

    name: str
    num: int
    body: Body | Callable[[], Body | bytes] | None  # None: a body that drips


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds to the first token. `num_refused`: chats that were refused beside the hostile client."""

    name: str
    alone_s: list[float]
    beside_s: list[float]
    num_refused: int

    def ratio(self, share: float) -> float | None:
        """Return beside over alone, or None if the other client had no reply at all."""
        if not self.alone_s or not self.beside_s:
            return None
        return round(_at(self.beside_s, share) / _at(self.alone_s, share), 2)

    @property
    def ratios(self) -> list[float | None]:
        return [self.ratio(share) for share in SHARES]

    def fields(self) -> dict[str, Any]:
        return {
            "chats": [len(self.alone_s), len(self.beside_s)],
            "refused": self.num_refused,
            "alone_ms": [_ms(self.alone_s, share) for share in SHARES],
            "beside_ms": [_ms(self.beside_s, share) for share in SHARES],
            "ratio": self.ratios,
        }


def hostile_key(options: argparse.Namespace) -> dict[str, Any]:
    with target(options.model, "--max-body", str(MAX_BODY), "--max-num-seqs", "4", "--max-queue", "16") as server:
        driver = Driver(server)
        heart = Heartbeat(server.port, OTHER, chat_bytes=CHAT_BYTES)
        rows, wrong = [], []
        print(_line("", HEAD), file=sys.stderr)
        turns = max(LEAST_TURNS, int(60 * options.minutes / (2 * PHASE_S * len(HOSTILITIES))))
        try:
            _measured(heart)  # the first requests of a server cost more
            for hostility in HOSTILITIES:
                row, faults = asyncio.run(_met(hostility, server.port, heart, driver, turns))
                rows.append(row)
                wrong += [f"{hostility.name}: {fault}" for fault in faults]
                print(_line(row.name, row.fields()), file=sys.stderr, flush=True)
        finally:
            heart.close()
            driver.close()
    wrong += [f"{row.name}: {row.ratios} times as long (p50, p90)" for row in rows if not _is_fair(row)]
    return {"minutes": options.minutes, "rows": {row.name: row.fields() for row in rows}, "wrong": wrong}


async def _met(hostility: Hostility, port: int, heart: Heartbeat, driver: Driver, turns: int) -> tuple[Row, list[str]]:
    alone_s: list[float] = []
    beside_s: list[float] = []
    faults: list[str] = []
    num_refused = 0
    for _ in range(turns):
        alone_s += (await asyncio.to_thread(_measured, heart)).ttft_s
        tasks = [asyncio.create_task(_forever(hostility, port)) for _ in range(hostility.num)]
        await asyncio.sleep(1.0)  # for all to be there
        seen = await asyncio.to_thread(_measured, heart)
        beside_s += seen.ttft_s
        num_refused += seen.num_refused
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        faults += seen.faults
        faults += [f"left behind: {left}" for left in await asyncio.to_thread(driver.settle)]
    return Row(hostility.name, alone_s, beside_s, num_refused), sorted(set(faults))


def _measured(heart: Heartbeat) -> Seen:
    heart.beat("health", "chat")
    time.sleep(PHASE_S)
    return heart.rest()


async def _forever(hostility: Hostility, port: int) -> None:
    """Send the same again and again. A client that is refused comes again soon."""
    while True:
        try:
            if (body := hostility.body) is None:
                await _dripping_body(port)
            elif await ask(port, body() if callable(body) else body, ATTACKER) != 200:
                await asyncio.sleep(0.2)
        except OSError:
            await asyncio.sleep(0.2)


def _chat(*content: str | Body, max_tokens: int = 1, **fields: Any) -> Body:
    return {"messages": [user(*content)], "max_tokens": max_tokens, **fields}


STREAM = _chat("Go on.", max_tokens=2000, ignore_eos=True, stream=True)
SLOW_GRAMMAR = _chat("Go.", max_tokens=400, guided_grammar=AMBIGUOUS, stream=True)
LONG_TEXT = _chat("the fox sees a river " * 100_000)
ESCAPES = _chat("Go.", guided_grammar='start: "a"\n' + '\\"' * 30_000)  # its quotes never close


def _long_prompt() -> Body:
    return _chat(f"{next(_numbers)} The fox sees the river and the hill. " * 240)


def _odd_schema() -> Body:
    schema = alternatives(random.Random(next(_numbers)), 4000)
    tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
    return _chat("Go.", tools=[tool], tool_choice="required")


def _nested_counts() -> Body:
    """Make a regular expression of 28 characters whose automaton has millions of states. Each one is new."""
    counts = f"((((a{{{100 + next(_numbers) % 16}}}){{100}}){{100}}){{100}})"
    return _chat("Go.", max_tokens=4, guided_regex=counts)


def _empty_pieces() -> Body:
    return _chat("Go.", guided_regex="(|a)" * (29_000 + next(_numbers)))


@cache
def _small_parts() -> bytes:
    return dumps(_chat(*["a"] * 24_000))


@cache
def _strip() -> bytes:
    """Make an image of one row of pixels."""
    image = {"type": "image_url", "image_url": {"url": blank_png(49_000_000, height=1)}}
    return dumps(_chat(image, "What is this?"))


@cache
def _settings_of_templates() -> bytes:
    return dumps(_chat("Hi", chat_template_kwargs={f"k{number}": number for number in range(70_000)}))


@cache
def _heavy_documents() -> bytes:
    """Make a PDF of a hundred pages, each of thousands of shapes."""
    page = b"0 0 1 rg " + b"0 0 200 200 re f " * 5000
    file = base64.b64encode(pdf(*[page] * 100)).decode()
    return dumps(
        _chat({"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{file}"}})
    )


async def _dripping_body(port: int) -> None:
    """Send nearly the largest body, whose last bytes come one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = b'{"messages":[{"role":"user","content":"' + b"x" * (MAX_BODY - 100_000)
        writer.write(request(CHAT, body, ATTACKER, declared=MAX_BODY - 1000))
        await writer.drain()
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x" * 1024)
            await asyncio.wait({answer}, timeout=1.0)
        await asyncio.sleep(0.2)
    finally:
        writer.close()


HOSTILITIES = (
    Hostility("a full line", 200, STREAM),
    Hostility("many open streams", 16, STREAM),
    Hostility("bodies that drip", 8, None),
    Hostility("slow grammars", 4, SLOW_GRAMMAR),
    Hostility("long prompts", 8, _long_prompt),
    Hostility("texts beyond the context", 4, LONG_TEXT),
    Hostility("odd schemas", 4, _odd_schema),
    Hostility("grammars of escapes", 4, ESCAPES),
    Hostility("nested counts", 4, _nested_counts),
    Hostility("pieces that may be empty", 4, _empty_pieces),
    Hostility("bodies of small parts", 40, _small_parts),
    Hostility("images of one row", 4, _strip),
    Hostility("settings of templates", 4, _settings_of_templates),
    Hostility("documents of heavy pages", 6, _heavy_documents),
)


def _at(times: list[float], share: float) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[int(100 * share) - 1] if len(times) > 1 else times[0]


def _ms(times: list[float], share: float) -> float | None:
    return round(1000 * _at(times, share), 1) if times else None


def _is_fair(row: Row) -> bool:
    return all(ratio is not None and ratio <= MOST_RATIO for ratio in row.ratios)


def _line(name: str, fields: dict[str, Any]) -> str:
    """Return a line of the table."""
    values = (", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in fields.values())
    return f"{name:26}" + "".join(f"{value:>18}" for value in values)
