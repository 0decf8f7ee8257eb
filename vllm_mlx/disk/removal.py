"""Removes cached state from disk: for room, because files are damaged or gone, or because a user asks for it.

The engine thread does this in small pieces between its steps. Files are removed on the writer's thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from ..cache.node import Node
from .folder import Folder
from .index import DiskIndex
from .record import Record

PIECES = 64  # nodes that are looked at, or removed, between two steps


class Removal:
    """Belongs to the engine thread. `submit` runs work on the writer's thread."""

    def __init__(self, folder: Folder, index: DiskIndex, submit: Callable[[Callable[[], None]], object]):
        self._folder, self._index, self._submit = folder, index, submit
        self._chores: deque[Iterator[None]] = deque()
        self._num_clears = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._chores)

    def advance(self) -> None:
        """Do a few pieces of the work, and remove what nothing uses any more. Called between two steps."""
        for _ in range(PIECES):
            if not self._chores:
                break
            chore = self._chores.popleft()  # one that raises an error is dropped
            with suppress(StopIteration):
                next(chore)
                self._chores.appendleft(chore)
        self.sweep()

    def sweep(self) -> int:
        """Remove the files that no longer contain anything in use. Returns their bytes."""
        return self.remove(self._index.unused())

    def remove(self, records: Iterable[Record]) -> int:
        records = list(records)
        if records:
            self._submit(partial(self._folder.remove, records))  # before the next write
        return sum(record.file_bytes for record in records)

    def make_room(self, num_bytes: int, then: Callable[[bool], None]) -> None:
        """Remove the files of least worth, until `num_bytes` more fit. `then` gets whether anything was removed."""
        self._chores.append(self._making_room(num_bytes, then))

    def _making_room(self, num_bytes: int, then: Callable[[bool], None]) -> Iterator[None]:
        self._index.drop_repeated()
        freed_bytes = self.sweep()
        while freed_bytes < num_bytes:
            victims, num_clears = self._index.tree.evicting(), self._num_clears
            while num_clears == self._num_clears and freed_bytes < num_bytes and next(victims, self) is None:
                freed_bytes += self.sweep()  # a part of a file frees nothing
                yield
            if num_clears == self._num_clears:
                break
        then(freed_bytes > 0)

    def clear(self, salts: str) -> None:
        """Forget the state of all salts that begin with `salts`. Its files are removed soon."""
        self._index.drop_repeated()
        self._num_clears += 1  # victims may be among what is cleared
        self._chores.append(self._letting_go(self._index.tree.detach(salts=salts)))

    def _letting_go(self, leaves: list[Node]) -> Iterator[None]:
        while leaves:
            leaves.pop()
            self.sweep()
            yield
        self.sweep()
        self._submit(self._folder.shorten)

    def lose(self, record: Record) -> None:
        """Remove a record that cannot be used, and what continues it."""
        self._index.lose(record.name)
        self.remove([record])
