"""Faults on the engine thread, on demand: at the next call of a seam, or some calls later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.runner.batch import Batch, InFlight
from vllm_mlx.runner.runner import Runner
from vllm_mlx.runner.sampler import Sampler
from vllm_mlx.scheduler.prefill import PrefillPlanner

SEAMS: dict[str, tuple[Any, str]] = {
    "forward": (Batch, "forward"),
    "sampler": (Sampler, "sample"),
    "read": (InFlight, "read"),
    "arrangement": (Runner, "_arrange"),
    "step": (Runner, "decode"),
    "chunk": (Runner, "_prefill_chunk"),
    "look-up": (MemoryAwarePrefixCache, "match"),
    "plan": (PrefillPlanner, "plan"),
    "verify": (Batch, "feed_blocks"),
    "settle": (Batch, "settle"),
}
SHARED = ("forward", "sampler", "read")  # work of several rows at once


class InjectedFault(RuntimeError):
    """What no code of ours raises."""


class Faults:
    def __init__(self) -> None:
        self.num_struck = 0
        self._countdown: dict[str, int] = {}  # seam -> calls that go well before one that does not
        self._done_first: set[str] = set()

    def plan(self, seam: str, *, after: int = 0, done_first: bool = False) -> None:
        """`done_first`: the work is done, and what it returns is lost."""
        self._countdown[seam] = after
        (self._done_first.add if done_first else self._done_first.discard)(seam)

    def wrap(self, seam: str, works: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left = self._countdown.get(seam)
            if left is None:
                return works(*args, **kwargs)
            if left:
                self._countdown[seam] = left - 1
                return works(*args, **kwargs)
            del self._countdown[seam]
            self.num_struck += 1
            if seam in self._done_first:
                works(*args, **kwargs)
            raise InjectedFault(seam)

        return call


@contextmanager
def faults() -> Iterator[Faults]:
    """None strikes before it is planned."""
    planned = Faults()
    with pytest.MonkeyPatch.context() as patch:
        for seam, (owner, name) in SEAMS.items():
            patch.setattr(owner, name, planned.wrap(seam, getattr(owner, name)))
        yield planned


@contextmanager
def failing(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Calls raise for whose arguments `when` holds."""
    works = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise InjectedFault
        return works(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield
