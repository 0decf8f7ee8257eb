"""Requests of several people who work with agents for some days, built from recorded sessions.

The recordings give what prompts share, how long they are and where their snapshot points lie; `python -m
scripts._replay.beginnings --lengths` wrote them down. Who begins which session when, how long people think and which
sessions are resumed is drawn here.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

HOUR, DAY = 3600.0, 86400.0
MORNING, EVENING = 9 * HOUR, 17 * HOUR
TOOL_S, THINK_S, BREAK_S = 8.0, 120.0, 0.75 * HOUR  # medians: a tool runs, a person reads and writes, is away
THINKS, IS_AWAY, IS_RESUMED = 0.25, 0.02, 0.3  # shares of pauses, of pauses, and of sessions
LAST_REPLY = 200  # tokens of a reply that no recorded prompt repeats
AGENTS = ("claude_code", "codex", "opencode", "claude_code")  # one a person, in turn
_FOLDERS = 1 << 30  # texts from this number on are those of folders
_FILE = Path(__file__).parent / "recorded_prompts.json"


class Run(NamedTuple):
    """Tokens `[start, end)` of some text, at the same positions of every prompt that has them."""

    text: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    at_s: float
    session: int
    runs: tuple[Run, ...]  # of the prompt and its reply
    num_prompt: int
    points: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.runs[-1].end

    def token_ids(self, start: int, end: int) -> list[int]:
        ids: list[int] = []
        for run in self.runs:
            first = run.text << 24
            ids += range(first + max(start, run.start), first + min(end, run.end))
        return ids

    def common(self, other: "Request") -> int:
        """Tokens of this prompt with its reply that the other's prompt begins with."""
        shared = 0
        for mine, theirs in zip(self.runs, other.runs, strict=False):
            if mine.text != theirs.text:
                break
            shared = min(mine.end, theirs.end)
            if mine.end != theirs.end:
                break
        return min(shared, other.num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A line of the file: see there."""

    agent: str
    session: str
    is_continued: bool
    base: int
    common: int
    tokens: int
    points: list[int]
    reply: int

    @property
    def folder(self) -> tuple[int, int]:
        """The tokens that prompts about one folder share, but not those about others."""
        return self.points[0], self.points[1] // 64 * 64


@cache
def recorded() -> tuple[Prompt, ...]:
    return tuple(Prompt(**line) for line in json.loads(_FILE.read_text(encoding="utf-8")))


@cache
def _texts(number: int) -> tuple[Run, ...]:
    """A recorded prompt as the texts that recorded prompts introduced, by number."""
    prompt = recorded()[number]
    before = _cut(_texts(prompt.base), prompt.common) if prompt.common else ()
    own = Run(number, prompt.common, prompt.tokens)
    return (*before, own) if own.end > own.start else before


def _cut(runs: Sequence[Run], end: int) -> tuple[Run, ...]:
    return tuple(Run(run.text, run.start, min(run.end, end)) for run in runs if run.start < end)


def _salted(number: int, person: int, salt: int) -> tuple[Run, ...]:
    """A recorded prompt in a person's folder and in a session of its own."""
    start, end = recorded()[number].folder
    size = 2 * len(recorded())
    own = (Run(size * salt + run.text, max(run.start, end), run.end) for run in _texts(number) if run.end > end)
    return (*_cut(_texts(number), start), Run(_FOLDERS + start * 100 + person, start, end), *own)


def requests_of(*, people: int, sessions_a_day: int = 3, days: int = 2, seed: int = 1) -> list[Request]:
    """Everybody begins so many sessions each day, and takes up some of them again on the next day."""
    draw = random.Random(seed)
    by_session = {
        key: list(numbers)
        for key, numbers in groupby(
            sorted(range(len(recorded())), key=lambda n: (_session_of(n), n)), key=lambda n: _session_of(n)
        )
    }
    requests: list[Request] = []
    for number in range(people * sessions_a_day * days):
        person, day = number % people, number // (people * sessions_a_day)
        choices = sorted(key for key in by_session if key[0] == AGENTS[person % len(AGENTS)])
        numbers = by_session[draw.choice(choices)]
        requests += _session(draw, person, number + 1, numbers, day * DAY, is_last_day=day == days - 1)
    return sorted(requests, key=lambda request: request.at_s)


def _session_of(number: int) -> tuple[str, str]:
    return recorded()[number].agent, recorded()[number].session


def _session(
    draw: random.Random, person: int, salt: int, numbers: list[int], day_s: float, *, is_last_day: bool
) -> list[Request]:
    now = day_s + draw.uniform(MORNING, EVENING)
    prompts = [recorded()[number] for number in numbers]
    resumed_at = next((n for n, prompt in enumerate(prompts) if prompt.is_continued), 2 * len(prompts) // 3)
    is_resumed = draw.random() < IS_RESUMED and resumed_at > 0
    requests: list[Request] = []
    for position, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        if is_resumed and position == resumed_at:
            now = day_s + DAY + draw.uniform(MORNING, EVENING)
            if is_last_day:
                break
        runs = _salted(number, person, salt)
        following = next((n for n in numbers if recorded()[n].base == number and prompt.reply), None)
        if following is not None:
            longer = _salted(following, person, salt)
            with_reply = _cut(longer, min(prompt.tokens + prompt.reply, longer[-1].end))
        else:
            own = len(recorded()) * (2 * salt + 1) + number
            with_reply = (*runs, Run(own, prompt.tokens, prompt.tokens + LAST_REPLY))
        requests.append(
            Request(at_s=now, session=salt, runs=with_reply, num_prompt=prompt.tokens, points=tuple(prompt.points))
        )
        now += _pause_s(draw)
    return requests


def _pause_s(draw: random.Random) -> float:
    kind = draw.random()
    median = BREAK_S if kind < IS_AWAY else THINK_S if kind < IS_AWAY + THINKS else TOOL_S
    return median * math.exp(draw.gauss(0.0, 0.7))
