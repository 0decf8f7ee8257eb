"""Cached state of which every rank of a model has a slice: the tree on rank 0 holds rank 0's slice and a name.

Changes of such state by the tree are recorded, so that the other ranks repeat them. It knows no tree and no rank.
"""

from collections.abc import Iterable
from typing import Any

from ..util.faults import RanksParted

Event = list[int]  # [name]: no longer used; [name, at, left, right]: split after `at` tokens into two new names


class SharedLog:
    """Gives out the names, and records changes of the named state."""

    def __init__(self) -> None:
        self.names: set[int] = set()  # in use
        self._num_made = 0
        self._events: list[Event] = []

    def __bool__(self) -> bool:
        """Return whether there are events to report."""
        return bool(self._events)

    def make(self, num: int) -> int:
        """Return the first of `num` new names, which follow each other."""
        self._num_made += num
        return self._num_made - num + 1

    def note(self, *event: int) -> None:
        self._events.append(list(event))

    def keep(self, held: Iterable[Any]) -> None:
        """Note that only the names of the segments and states that are `held` are still used."""
        unused = self.names - {part.name for part in held if isinstance(part, Shared)}
        self.names -= unused
        self._events += [[name] for name in sorted(unused)]

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events


class Shared:
    """A segment or a state, as the tree sees it. All slices have the same size."""

    __slots__ = ("_log", "name", "nbytes", "num_buffers", "own")

    def __init__(self, log: SharedLog, name: int, own: Any):
        """`own` is this rank's slice."""
        self._log, self.name, self.own = log, name, own
        self.nbytes, self.num_buffers = int(own.nbytes), int(own.num_buffers)
        log.names.add(name)

    def split(self, at: int) -> "tuple[Shared, Shared]":
        try:
            left, right = self.own.split(at)
        except RuntimeError as error:
            raise RanksParted(f"Rank 0 could not split cached state: {error}") from error
        name = self._log.make(2)
        self._log.note(self.name, at, name, name + 1)
        return Shared(self._log, name, left), Shared(self._log, name + 1, right)
