"""What the folder on disk holds, as a prefix tree whose segments are ranges of files. It reads and writes no file.

It is made from the rows of the records, so it can always be made again. All checkpoints of the folder are in it,
because they share its limit.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..cache.index import WORD_BYTES
from ..cache.node import Node, ResumeRule, Space
from ..cache.tree import PrefixTree
from .record import Header, Record

_WHOLE = 1 << 40  # an eviction removes all tokens of a node, because files are not cut


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Use:
    """The use of one record's file, shared by the parts of the tree that need it and by records that continue it.

    It ends with the last of them.
    """

    before: "_Use | None"  # the use of the record that this one continues, without which it cannot be found


@dataclass(frozen=True, slots=True)
class FileRange:
    """The tokens `[first, first + length)` of a run on disk, counted from the run's first token."""

    record: Record
    first: int
    length: int
    use: _Use
    num_buffers = 0

    @property
    def nbytes(self) -> int:
        return self._bytes_before(self.first + self.length) - self._bytes_before(self.first)

    def split(self, at: int) -> tuple["FileRange", "FileRange"]:
        return (
            FileRange(self.record, self.first, at, self.use),
            FileRange(self.record, self.first + at, self.length - at, self.use),
        )

    def _bytes_before(self, position: int) -> int:
        header = self.record.header
        return self.record.file_bytes * position // max(1, header.end - header.start)


@dataclass(frozen=True, slots=True)
class FileState:
    record: Record
    use: _Use
    num_buffers = 0

    @property
    def nbytes(self) -> int:
        return self.record.file_bytes


class DiskIndex:
    """Belongs to the engine thread. Times are seconds since the epoch, as files have them."""

    def __init__(self) -> None:
        self.tree = PrefixTree(max_bytes=1 << 62, min_cut=_WHOLE)
        self._records: dict[str, Record] = {}
        self._uses: dict[str, weakref.ref[_Use]] = {}  # by the names of records
        self._ended: list[str] = []  # names of records whose last use has ended; the file may be an earlier one
        self._repeated: list[_Use] = []  # runs whose tokens other runs hold: what continues them may come later
        self._rules: dict[str, ResumeRule] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add_model(self, fingerprint: str, rule: ResumeRule, s_per_token: float) -> None:
        self._rules[fingerprint] = rule
        self.tree.add_model(fingerprint, rule, s_per_token=s_per_token)

    def add(self, record: Record) -> bool:
        """Add a record. Returns False if it is of no use: what it continues is missing, or its state is stored already.

        A run whose tokens are stored already brings its windows. If these are stored too, it is kept for what continues
        it, until `drop_repeated`.
        """
        header = record.header
        if self._rules.setdefault(header.fingerprint, header.rule) != header.rule:
            return False
        self.tree.add_model(header.fingerprint, header.rule, s_per_token=header.s_per_token)
        key, before = self._key(header), self._uses.get(header.parent, _no_use)()
        if key is None or (header.parent and before is None):
            return False
        use = _Use(before)
        common = self.tree.common_length(space_of(header), key)
        if header.kind == "run" and common >= header.end:
            self._repeated.append(use)
        if not self._insert(record, use, key, common):
            return False
        self._records[record.name] = record
        self._uses[record.name] = weakref.ref(use, partial(self._has_ended, record.name))
        return True

    def _insert(self, record: Record, use: _Use, key: bytes, common: int) -> bool:
        header = record.header
        state = None
        if header.kind == "state":
            if common != header.start or self.has_state(space_of(header), key):
                return False
            state = FileState(record, use)
        return self.tree.insert(
            space_of(header),
            key,
            start=header.start,
            segment=FileRange(record, 0, header.end - header.start, use),
            window_start=min(header.start + header.layout.get("window_offset", 0), header.end),
            state=state,
            now=record.used_s,
        )

    def _has_ended(self, name: str, _: object) -> None:
        self._ended.append(name)

    def drop_repeated(self) -> None:
        """Keep runs whose tokens other runs hold only where something continues them."""
        self._repeated.clear()

    def has_state(self, space: Space, key: bytes) -> bool:
        """Whether a state is stored at exactly the key's end."""
        path = self.tree.path(space, key)
        return bool(path) and path[-1].end * WORD_BYTES == len(key) and path[-1].state is not None

    def age(self) -> None:
        """Give the nodes the times at which their files were used last, once all have been added in any order."""
        self.drop_repeated()
        for node in self.tree.nodes():
            node.last_used = node.segment.record.used_s  # type: ignore[attr-defined]
            if node.state is not None:
                node.state_used = node.state.record.used_s  # type: ignore[attr-defined]

    def run_before(self, space: Space, key: bytes) -> Record | None:
        """The run that holds the last token of the key, all of which is stored; None for the empty key."""
        path = self.tree.path(space, key)
        return next(_records(path[-1])) if path else None

    def records_on(self, space: Space, key: bytes) -> list[Record]:
        return [record for node in self.tree.path(space, key) for record in _records(node)]

    def lose(self, name: str) -> None:
        """Forget a record whose file is gone, and what continues it."""
        if (record := self._records.get(name)) is None:
            return
        header, key = record.header, self._key(record.header)
        if key is not None and header.kind == "run":
            self.tree.drop(space_of(header), key, start=header.start)
        elif key is not None:
            self.tree.drop_state(space_of(header), key, is_lost=True)
        self._records.pop(name, None)

    def unused(self) -> list[Record]:
        """Forget the records that nothing uses any more, and return them: their files can go.

        A read that runs is a use.
        """
        unused = []
        while self._ended:
            name = self._ended.pop()
            if name in self._records and self._uses[name]() is None:
                unused.append(self._records.pop(name))
                del self._uses[name]
        return unused

    def _key(self, header: Header) -> bytes | None:
        """The packed path up to the record's end. None if a record before it is unknown."""
        parts, end = [header.words], header.start
        while header.parent:
            parent = self._records.get(header.parent)
            if parent is None or not parent.header.start < end <= parent.header.end:
                return None
            header = parent.header
            parts.append(header.words[: (end - header.start) * WORD_BYTES])
            end = header.start
        return b"".join(reversed(parts)) if end == 0 else None


def space_of(header: Header) -> Space:
    return (header.fingerprint, header.salt)


def _records(node: Node) -> Iterator[Record]:
    """The run whose tokens the node holds, and its state."""
    yield node.segment.record  # type: ignore[attr-defined]
    if node.state is not None:
        yield node.state.record  # type: ignore[attr-defined]


def _no_use() -> None:
    """The use of a record that is not in the tree."""
