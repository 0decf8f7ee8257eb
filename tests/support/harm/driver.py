"""Sends an attack to a target beside the heartbeat, and measures what it does to everybody else and leaves behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from .heartbeat import PATIENCE_S, Heartbeat, Seen
from .target import OTHER, Target
from .vitals import Vitals
from .wire import Outcome, Shot, fire

SETTLE_S = 15.0  # for requests to end once their clients have their answers or have left
MEMORY_SETTLE_S = 2.0  # for memory to come back
SAMPLE_S = 0.02
MOST_MEMORY_BYTES = 6 << 30  # a server that takes more is ended, for the sake of the machine
IDLE_SHARE = 0.5  # of one core, at least, that a server takes which still works on something
LINGER_S = 0.3  # to watch the server after clients that left at once


@dataclass(frozen=True, slots=True)
class Attack:
    """One or several connections at once. `path` decides the envelope that refusals must have."""

    name: str
    path: str
    shots: tuple[Shot, ...]
    answer_s: float = 60.0  # the longest time for all answers
    pixel_bytes: int = 0  # what its images may take while they are decoded

    @property
    def num_bytes(self) -> int:
        return sum(shot.num_bytes for shot in self.shots)


@dataclass(frozen=True, slots=True)
class Observation:
    """Seconds and bytes. The server's own times are those of the attack without what follows it."""

    outcomes: tuple[Outcome, ...]
    seen: Seen
    wall_s: float
    cpu_s: float
    loop_cpu_s: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    left: tuple[str, ...]

    @property
    def loop_delay_s(self) -> float:
        return max(self.seen.health_s, default=0.0)

    @property
    def loop_delay_p99_s(self) -> float:
        ordered = sorted(self.seen.health_s) or [0.0]
        return ordered[int(0.99 * (len(ordered) - 1))]

    @property
    def gap_s(self) -> float:
        return max(self.seen.gaps_s, default=0.0)

    @property
    def ttft_s(self) -> float:
        return max(self.seen.ttft_s, default=0.0)


class ServerLost(Exception):
    """The server answers nobody any more, or its process has ended."""


class Driver:
    """Owns the heartbeat. One attack at a time."""

    def __init__(self, target: Target, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long the other clients wait for an answer."""
        self.target = target
        self._heart = Heartbeat(target.port, OTHER, patience_s=patience_s)

    def close(self) -> None:
        self._heart.close()

    def observe(self, attack: Attack) -> Observation:
        """Raises ServerLost."""
        vitals = self.target.vitals
        before_bytes = self.target.held_bytes()
        self._heart.beat()
        with _peak_of(vitals) as peak:
            started_s, cpu_s, loop_cpu_s = time.monotonic(), vitals.cpu_s(), vitals.loop_cpu_s()
            outcomes = tuple(fire(self.target.port, attack.shots, attack.answer_s))
            if any(shot.num_answers == 0 for shot in attack.shots):
                time.sleep(LINGER_S)
            seen = self._heart.rest()
            times = (time.monotonic() - started_s, vitals.cpu_s() - cpu_s, vitals.loop_cpu_s() - loop_cpu_s)
            try:
                left = self.settle()
            except ServerLost as error:
                raise ServerLost(f"{error}; {peak[0] >> 20} MB of memory at the peak") from error
        after_bytes = self._settled_memory(before_bytes)
        return Observation(outcomes, seen, *times, before_bytes, max([before_bytes, *peak]), after_bytes, left)

    def settle(self) -> tuple[str, ...]:
        """Waits until no request is left and the server stops working. Returns what stays."""
        left: list[str] = []
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            try:
                left = self.target.left()
            except httpx.HTTPError as error:
                raise ServerLost(f"/v1/status: {type(error).__name__}: {error}") from error
            if not left and not (left := self._work()):
                return ()
        return tuple(left)

    def _work(self) -> list[str]:
        cpu_s, duration_s = self.target.vitals.cpu_s(), 5 * SAMPLE_S
        time.sleep(duration_s)
        share = (self.target.vitals.cpu_s() - cpu_s) / duration_s
        return [f"work on no request ({100 * share:.0f} % of a core)"] if share > IDLE_SHARE else []

    def _settled_memory(self, before_bytes: int) -> int:
        """The least that was seen within a moment."""
        least, deadline_s = self.target.held_bytes(), time.monotonic() + MEMORY_SETTLE_S
        while least > before_bytes + (32 << 20) and time.monotonic() < deadline_s:
            least = min(least, self.target.held_bytes())
        return least


@contextmanager
def _peak_of(vitals: Vitals) -> Iterator[list[int]]:
    """A list of one value, the highest that was seen when the block ends. Ends a process that takes too much."""
    found, stopped = [0], threading.Event()

    def sample() -> None:
        while not stopped.wait(SAMPLE_S):
            found[0] = max(found[0], vitals.memory_bytes())
            if found[0] > MOST_MEMORY_BYTES:
                os.kill(vitals.pid, signal.SIGKILL)
                break

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        thread.join()
