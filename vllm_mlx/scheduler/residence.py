"""Decides whether one model's weights are in memory. It is pure: times are passed in, and it knows no mlx."""

from collections import Counter
from typing import Literal

from ..core.errors import ModelUnavailable

State = Literal["ready", "leaving", "unloaded", "loading", "failed"]
Reason = Literal["start", "request", "command"]

FIRST_PAUSE_S = 30.0  # after a failed load, before a request begins another one; each failure doubles it
LONGEST_PAUSE_S = 600.0
LEAVING_S = 10.0  # the longest wait for cached state that is being written to disk


class Residence:
    """Owns the state of one model. Only the engine thread changes it, but for `used_s`; any thread may read it."""

    def __init__(self, *, idle_unload_s: float = 0.0):
        """`idle_unload_s`: the time without a request after which the weights leave; with 0, they stay."""
        self.state: State = "ready"
        self.loads: Counter[Reason] = Counter({"start": 1})
        self.cause: str | None = None  # why the last load failed; None if it did not
        self.used_s = 0.0  # when the model was used last
        self.is_short = False  # whether requests wait for memory that other models hold
        self.is_yielding = False  # whether what comes now waits until the weights have left for another model
        self._idle_unload_s = idle_unload_s
        self.begun_s = 0.0  # when the present state began
        self.reason: Reason = "start"  # of the last load
        self._pause_s = 0.0

    @property
    def takes_memory(self) -> bool:
        """Whether the weights are in memory, or are being loaded."""
        return self.state in ("ready", "leaving", "loading")

    def may_load(self, now: float) -> bool:
        """Return whether a request may begin a load: none is running, and no failed one was a moment ago."""
        return self.state in ("unloaded", "failed") and self.refusal(now) is None

    def use(self, now: float) -> None:
        """Note that a request is here, or has just come."""
        self.used_s = max(self.used_s, now)

    def is_idle(self, now: float) -> bool:
        """Return whether the weights should leave, because no request came for the time that is set."""
        return self.state == "ready" and 0 < self._idle_unload_s <= now - self.used_s

    def leave(self, now: float) -> None:
        """Note that the weights leave once cached state is on disk."""
        self._enter("leaving", now)

    def is_overdue(self, now: float) -> bool:
        """Return whether the weights leave now, although not all is on disk."""
        return now - self.begun_s >= LEAVING_S

    @property
    def is_wanted(self) -> bool:
        """Whether a request has come since the present state began."""
        return self.used_s > self.begun_s

    def stay(self, now: float) -> None:
        """Note that the weights, which were to leave, stay after all. What wants them needs no load then."""
        self.use(now)
        self._enter("ready", now)

    def unloaded(self, now: float) -> None:
        """Note that the weights have left, or that a load was given up."""
        self._enter("unloaded", now)

    def load(self, reason: Reason, now: float) -> None:
        """Note that a load begins."""
        self.loads[reason] += 1
        self.reason = reason
        self._enter("loading", now)

    def loaded(self, now: float) -> float:
        """Note that the model is in memory. Returns the seconds that the load took."""
        load_s = now - self.begun_s
        self.cause, self._pause_s = None, 0.0
        self._enter("ready", now)
        self.use(now)
        return load_s

    def fail(self, cause: str, now: float) -> None:
        """Note why a load failed. Each failure in a row of a load for requests doubles the pause after it."""
        self.cause = cause
        longer_s = self._pause_s if self.reason == "command" else min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._pause_s = longer_s or FIRST_PAUSE_S
        self._enter("failed", now)

    def refusal(self, now: float) -> ModelUnavailable | None:
        """Return the error of requests that wait during the pause after a failed load; None at other times."""
        left_s = self.begun_s + self._pause_s - now
        if self.state != "failed" or left_s <= 0:
            return None
        return ModelUnavailable(f"The model could not be loaded: {self.cause}", retry_after_s=left_s)

    def _enter(self, state: State, now: float) -> None:
        self.state, self.begun_s = state, now
