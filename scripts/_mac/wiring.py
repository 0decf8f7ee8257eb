"""The experiment that decides whether weights may be wired: does macOS panic under the load that is reported to do it?

Two streams of prompts that never repeat, and a prefix cache so small that each prompt evicts another: buffers come and
go all the time. One arm wires nothing, the other one the weights. Both must live.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from scripts.served import Server, serving

from .machine import virtual_memory
from .progress import Check, Outcome, Result, verdict

_LEAST_CACHE = 10**6  # bytes; a flag with fewer is refused
ARMS = ("none", "weights")
WARNING = (
    "This may restart the Mac: a kernel panic is what the experiment looks for. Save your work and close other "
    "programs. After a restart, run the same command again: it goes on, and the report says in which arm it was."
)
_STREAMS = 2
_REPLY = 64  # tokens


@dataclass(slots=True)
class _Seen:
    num_replies: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    model: str
    log: Path
    minutes: float  # of an arm
    prompt_tokens: int = 12_000

    def checks(self) -> list[Check]:
        return [
            Check(
                f"wired-{arm}",
                f"{_STREAMS} streams, tiny cache, --wired {arm}.",
                self.minutes + 1,
                partial(self._load, arm),
                is_risky=True,
            )
            for arm in ARMS
        ]

    def _load(self, arm: str) -> Result:
        with serving(self.log, self.model) as server:
            facts = server.status()["model_facts"]
        prompt_bytes = facts["fixed_bytes_per_row"] + facts["bytes_per_token"] * self.prompt_tokens
        flags = ("--wired", arm, "--cache-memory", str(max(_LEAST_CACHE, int(1.5 * prompt_bytes))))
        log_start = self.log.stat().st_size
        seen, until_s = _Seen(), time.monotonic() + 60 * self.minutes
        before = virtual_memory()
        with serving(self.log, self.model, *flags) as server, ThreadPoolExecutor(_STREAMS) as pool:
            for _ in range(_STREAMS):
                pool.submit(self._ask_until, server, until_s, seen)
            pool.shutdown()
            after, status = virtual_memory(), server.status()
        evictions = status["shrinking"]["cache_evictions"]
        text = f"{self.minutes:g} min, {seen.num_replies} replies, {evictions} evictions"
        if before is not None and after is not None:
            text += f", {(after.wired_bytes - before.wired_bytes) / 1e9:+.2f} GB wired"
        text += f"; errors: {seen.errors[:3]}." if seen.errors else "; no error."
        if unwired := re.search(r"The weights are not wired: (.*)", self.log.read_text(encoding="utf-8")[log_start:]):
            return Result(Outcome.SKIPPED, f"{text} Nothing was wired: {unwired[1]}.")
        return verdict(seen.num_replies > 0 and not seen.errors, text)

    def _ask_until(self, server: Server, until_s: float, seen: _Seen) -> None:
        while time.monotonic() < until_s and len(seen.errors) < 10:
            try:
                stream = server.stream(server.prompt(self.prompt_tokens), _REPLY)
            except httpx.HTTPError as error:
                seen.errors.append(f"{type(error).__name__}: {error}")
                continue
            if stream.moments:
                seen.num_replies += 1
            else:
                seen.errors.append("a reply without a token")
