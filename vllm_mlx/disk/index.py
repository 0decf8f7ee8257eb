"""The content of the folder, as a prefix tree whose segments are ranges of files. It reads and writes no file.

It is made from the rows of the records, so it can always be made again. All checkpoints of the folder are in it,
because they share its limit.
"""

from dataclasses import dataclass

from ..cache.index import WORD_BYTES
from ..cache.node import Node, ResumeRule, Space
from ..cache.tree import MemoryAwarePrefixCache
from .record import Header, Record

_WHOLE = 1 << 40  # an eviction removes all tokens of a node, because files are not cut


@dataclass(eq=False, slots=True)
class Stored:
    """A record on disk. It lasts as long as a part of the tree, a record that continues it, or a match refers to it."""

    record: Record
    before: "Stored | None"  # the run that it continues, without which it cannot be found
    noted_s: float = 0.0  # when its last use was noted

    def key(self) -> bytes:
        """Return the packed path up to the record's end."""
        parts, end, before = [self.record.header.words], self.record.header.start, self.before
        while before is not None:
            header = before.record.header
            parts.append(header.words[: (end - header.start) * WORD_BYTES])
            end, before = header.start, before.before
        return b"".join(reversed(parts))


@dataclass(frozen=True, slots=True)
class FileRange:
    """The tokens `[first, first + length)` of a run on disk, counted from the run's first token."""

    stored: Stored
    first: int
    length: int
    num_buffers = 0

    @property
    def nbytes(self) -> int:
        return self._bytes_before(self.first + self.length) - self._bytes_before(self.first)

    def split(self, at: int) -> tuple["FileRange", "FileRange"]:
        after = FileRange(self.stored, self.first + at, self.length - at)
        return FileRange(self.stored, self.first, at), after

    def _bytes_before(self, position: int) -> int:
        header = self.stored.record.header
        return self.stored.record.file_bytes * position // max(1, header.end - header.start)


@dataclass(frozen=True, slots=True)
class FileState:
    stored: Stored
    num_buffers = 0

    @property
    def nbytes(self) -> int:
        return self.stored.record.file_bytes


class DiskIndex:
    """Belongs to the engine thread. Times are seconds since the epoch, as rows have them."""

    def __init__(self) -> None:
        self.tree = MemoryAwarePrefixCache(max_bytes=1 << 62, min_cut=_WHOLE)
        self._stored: dict[str, Stored] = {}  # by name
        self._num_changes = -1  # those of the tree when the unused records were found last
        # runs whose tokens other runs hold: records that continue them may come later
        self._repeated: list[Stored] = []
        self._rules: dict[str, ResumeRule] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def add_model(self, fingerprint: str, rule: ResumeRule, s_per_token: float) -> None:
        self._rules[fingerprint] = rule
        self.tree.add_model(fingerprint, rule, s_per_token=s_per_token)

    def add(self, record: Record) -> bool:
        """Add a record. Returns False if it is useless: the run before it is missing, or its state is stored already.

        A run whose tokens are stored already adds its windows. If these are stored as well, the run is kept for the
        records that continue it, until `drop_repeated`.
        """
        header, before = record.header, self._stored.get(record.header.parent)
        is_known = self._rules.setdefault(header.fingerprint, header.rule) == header.rule
        if not is_known or not header.continues(None if before is None else before.record.header):
            return False
        self.tree.add_model(header.fingerprint, header.rule, s_per_token=header.s_per_token)
        stored = Stored(record, before)
        if not self._insert(stored, stored.key()):
            return False
        self._stored[record.name] = stored
        return True

    def _insert(self, stored: Stored, key: bytes) -> bool:
        header, state = stored.record.header, None
        space = space_of(header)
        common = self.tree.common_length(space, key)
        if header.kind == "state":
            if common != header.start or self.has_state(space, key):
                return False
            state = FileState(stored)
        elif common >= header.end:
            self._repeated.append(stored)
        return self.tree.insert(
            space,
            key,
            start=header.start,
            segment=FileRange(stored, 0, header.end - header.start),
            window_start=min(header.start + header.layout.get("window_offset", 0), header.end),
            state=state,
            now=stored.record.used_s,
        )

    def drop_repeated(self) -> None:
        """Drop the runs whose tokens other runs hold, unless a record continues them."""
        self._num_changes -= bool(self._repeated)
        self._repeated.clear()

    def has_state(self, space: Space, key: bytes) -> bool:
        """Return whether a state is stored at exactly the key's end."""
        path = self.tree.path(space, key)
        return bool(path) and path[-1].end * WORD_BYTES == len(key) and path[-1].state is not None

    def age(self) -> None:
        """Give the nodes the times at which their files were used last, once all have been added in any order."""
        self.drop_repeated()
        for node in self.tree.store.nodes():
            node.last_used = node.segment.stored.record.used_s  # type: ignore[attr-defined]
            if node.state is not None:
                node.state_used = node.state.stored.record.used_s  # type: ignore[attr-defined]

    def run_before(self, space: Space, key: bytes) -> str:
        """Return the name of the run that holds the last token of a stored key, or "" for the empty key."""
        path = self.tree.path(space, key)
        return _stored_in(path[-1])[0].record.name if path else ""

    def stored_on(self, space: Space, key: bytes) -> list[Stored]:
        return [stored for node in self.tree.path(space, key) for stored in _stored_in(node)]

    def lose(self, name: str) -> None:
        """Forget a record whose file is gone, and the records that continue it."""
        if (stored := self._stored.get(name)) is None:
            return
        header = stored.record.header
        if header.kind == "run":
            self.tree.drop(space_of(header), stored.key(), start=header.start)
        else:
            self.tree.drop_state(space_of(header), stored.key(), is_lost=True)

    def unused(self) -> list[Record]:
        """Forget the records that nothing refers to any more, and return them: their files can go."""
        if self._num_changes == self.tree.store.num_changes:
            return []
        self._num_changes = self.tree.store.num_changes
        used: set[Stored] = set()
        for last in (*(part.stored for part in self.tree.store.held()), *self._repeated):  # type: ignore[union-attr]
            stored: Stored | None = last
            while stored is not None and stored not in used:
                used.add(stored)
                stored = stored.before
        unused = [name for name, stored in self._stored.items() if stored not in used]
        return [self._stored.pop(name).record for name in unused]


def space_of(header: Header) -> Space:
    return (header.fingerprint, header.salt)


def _stored_in(node: Node) -> list[Stored]:
    """Return the run that holds the tokens of a node, and the state at its end."""
    return [part.stored for part in (node.segment, node.state) if part is not None]  # type: ignore[attr-defined]
