"""Workload set `watching`: what /v1/status says of a load, beside what a client saw of the same load from outside."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from vllm_mlx.cli.bench import Words, quantile

from .client import BenchmarkError, Reply, Stream, read, start
from .figures import OURS, Aim, Figure
from .servers import free_port, our_command, running

OUTSIDE = "outside"
NUM_STREAMS = 4
LOAD_S = 15.0  # longer than the window of the rates
PROMPT_WORDS = 300
REPLY_TOKENS = 150
_TOLERANCE = 0.02

Value = tuple[str, str]  # figure, subject
Sample = tuple[float, float]  # when it ended, seconds


@dataclass(slots=True)
class Watched:
    """One server and all that it was asked. A load is put on it whenever a value is wanted for a second time."""

    port: int
    words: Words
    load_s: float = LOAD_S
    replies: list[Reply] = field(default_factory=list)  # of all loads: the server's windows reach back
    values: dict[Value, float] = field(default_factory=dict)

    def value(self, figure: str, subject: str) -> float:
        if (figure, subject) not in self.values:
            self._play()
        return self.values.pop((figure, subject))

    def _play(self) -> None:
        """Asks for the figures of the last seconds when a reply ends after `load_s`, for the totals when all have."""
        streams = self._start(NUM_STREAMS)
        end_s = time.perf_counter() + self.load_s
        while True:
            read(streams, until=partial(_has_ended, streams))
            if time.perf_counter() >= end_s:
                break
            streams += self._start(NUM_STREAMS - _num_open(streams))
        now = self._status()
        read(streams)
        self.replies += [stream.reply() for stream in streams]
        self.values = {**self._rates(now), **self._totals(self._status())}

    def _start(self, number: int) -> list[Stream]:
        # Without thoughts: their markers are tokens that no client sees.
        fields = {"chat_template_kwargs": {"enable_thinking": False}}
        return start(self.port, [self.words.text(PROMPT_WORDS) for _ in range(number)], REPLY_TOKENS, fields)

    def _status(self) -> dict[str, Any]:
        answer = httpx.get(f"http://127.0.0.1:{self.port}/v1/status", trust_env=False, timeout=30)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def _rates(self, status: dict[str, Any]) -> dict[Value, float]:
        window_s, latency = status["rate_window_s"], status["latency"]
        told_s = status["time"] - time.time() + time.perf_counter()  # by the clock of the replies
        tokens = sum(_tokens_after(reply, told_s - window_s, told_s) for reply in self.replies)
        values = {("replies", OURS): status["generation_tps"], ("replies", OUTSIDE): tokens / window_s}
        for name, field_name, samples in (("TTFT", "ttft_s", _ttfts), ("ITL", "inter_token_s", _gaps)):
            ours = latency[field_name]
            theirs = _latest(samples(self.replies), told_s, latency["window_s"], ours["count"])
            for part, share in (("p50", 0.5), ("p99", 0.99)):
                values[f"{name} {part}", OURS] = 1000 * ours[part]
                values[f"{name} {part}", OUTSIDE] = 1000 * (quantile(theirs, share) or 0.0)
        return values

    def _totals(self, status: dict[str, Any]) -> dict[Value, float]:
        usages = [reply.usage or {} for reply in self.replies]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        outside = {
            "requests": len(usages),
            "prompt tokens": sum(usage["prompt_tokens"] for usage in usages),
            "cached tokens": cached,
            "reply tokens": sum(usage["completion_tokens"] for usage in usages),
        }
        names = ("requests_processed", "prompt_tokens", "cached_tokens", "completion_tokens")
        ours = {name: status[f"total_{theirs}"] for name, theirs in zip(outside, names, strict=True)}
        return {(name, OUTSIDE): float(value) for name, value in outside.items()} | {
            (name, OURS): float(value) for name, value in ours.items()
        }


def _num_open(streams: list[Stream]) -> int:
    return sum(stream.is_open for stream in streams)


def _has_ended(streams: list[Stream]) -> bool:
    """Whether one has, so that another is due."""
    return _num_open(streams) < NUM_STREAMS


def _tokens_after(reply: Reply, start_s: float, end_s: float) -> float:
    moments = _arrivals(reply)
    return reply.num_tokens * sum(start_s <= moment <= end_s for moment in moments) / len(moments)


def _ttfts(replies: list[Reply]) -> list[Sample]:
    return [(reply.deltas[0].at_s, reply.ttft_s) for reply in replies]


def _gaps(replies: list[Reply]) -> list[Sample]:
    return [(later, later - earlier) for reply in replies for earlier, later in pairwise(_arrivals(reply))]


def _arrivals(reply: Reply) -> list[float]:
    """When its tokens came. The one that ends a turn has no text, and shows in the finish reason."""
    moments = [delta.at_s for delta in reply.deltas]
    if len(moments) < reply.num_tokens and reply.finished_s is not None:
        moments.append(reply.finished_s)
    return moments


def _latest(samples: list[Sample], end_s: float, window_s: float, count: int) -> list[float]:
    """Of the window; the server keeps a bounded number of samples of it, the last ones."""
    inside = sorted(sample for sample in samples if end_s - window_s < sample[0] <= end_s)
    if not inside or not count:
        raise BenchmarkError("Nothing was sampled within the server's window.")
    return [seconds for _, seconds in inside[-count:]]


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """The figures of this set, measurable while the block runs."""
    port = free_port()
    with running(our_command(model, port), port):
        yield figures(Watched(port, Words(0)))


def figures(watched: Watched) -> list[Figure]:
    def figure(name: str, unit: str, tolerance: float) -> Figure:
        measures: dict[str, Callable[[], float]] = {
            subject: partial(watched.value, name, subject) for subject in (OURS, OUTSIDE)
        }
        aims = (
            Aim(bound=1 - tolerance, at_least=True, against=OUTSIDE),
            Aim(bound=1 + tolerance, at_least=False, against=OUTSIDE),
        )
        return Figure(name=name, unit=unit, measures=measures, aims=aims)

    times = [figure(f"{name} {part}", "ms", _TOLERANCE) for name in ("TTFT", "ITL") for part in ("p50", "p99")]
    counts = [figure(name, "", 0.0) for name in ("requests", "prompt tokens", "cached tokens", "reply tokens")]
    return [*times, figure("replies", "tokens/s", _TOLERANCE), *counts]
