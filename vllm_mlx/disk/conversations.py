"""The conversations that records form: each is a path of runs from a first token to an end. Knows no files."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`own_bytes`: what no other conversation shares, which its removal would free."""

    runs: tuple[Record, ...]  # each continues the one before it, from its end or from its middle
    states: tuple[Record, ...]  # on the way, by position
    own_bytes: int

    @property
    def name(self) -> str:
        return self.runs[-1].name

    @property
    def records(self) -> tuple[Record, ...]:
        """What holds it, parents before children."""
        return (*self.runs, *self.states)

    @property
    def num_tokens(self) -> int:
        return self.runs[-1].header.end

    @property
    def num_bytes(self) -> int:
        return sum(record.file_bytes for record in self.records)

    @property
    def used_s(self) -> float:
        """Time of the last use of anything that only this conversation needs."""
        last = self.runs[-1]
        return max(record.used_s for record in (last, *self.states) if last.name in (record.name, record.header.parent))

    @property
    def own_words(self) -> bytes:
        """The key words of its last run."""
        return self.runs[-1].header.words


def conversations(records: Iterable[Record]) -> list[Conversation]:
    """A conversation ends where no run continues it. The ones used last come first."""
    runs, states = _by_kind(records)
    going_on = {(run.header.parent, run.header.start) for run in runs.values()}
    found = []
    for run in runs.values():
        if (run.name, run.header.end) not in going_on:
            path = _path(run, runs)
            found.append((path, _on_the_way(path, states)))
    uses = Counter(record.name for path, kept in found for record in (*path, *kept))
    return sorted(
        (
            Conversation(
                runs=tuple(path),
                states=tuple(kept),
                own_bytes=sum(record.file_bytes for record in (*path, *kept) if uses[record.name] == 1),
            )
            for path, kept in found
        ),
        key=lambda conversation: -conversation.used_s,
    )


def _by_kind(records: Iterable[Record]) -> tuple[dict[str, Record], dict[str, list[Record]]]:
    """The runs by name, and the states by the name of the run that they follow."""
    runs: dict[str, Record] = {}
    states: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.header.kind == "run":
            runs[record.name] = record
        else:
            states[record.header.parent].append(record)
    return runs, states


def _path(run: Record, runs: dict[str, Record]) -> list[Record]:
    path = [run]
    while path[-1].header.parent in runs:
        path.append(runs[path[-1].header.parent])
    return path[::-1]


def _on_the_way(path: list[Record], states: dict[str, list[Record]]) -> list[Record]:
    leaves = [*(run.header.start for run in path[1:]), path[-1].header.end]  # where the path leaves each run
    found = [
        state for run, end in zip(path, leaves, strict=True) for state in states[run.name] if state.header.start <= end
    ]
    return sorted(found, key=lambda state: state.header.start)


def with_what_follows(records: Iterable[Record], is_chosen: Callable[[Record], bool]) -> list[Record]:
    """The chosen records and all that continue them, children before parents: the order of removal."""
    children = _children(records)
    found: dict[str, Record] = {}
    left = [record for kept in children.values() for record in kept if is_chosen(record)]
    while left:
        record = left.pop()
        if record.name not in found:
            found[record.name] = record
            left += children[record.name]
    return sorted(found.values(), key=lambda record: (record.header.start, record.header.kind), reverse=True)


def unused_since(records: Iterable[Record], unix_s: float) -> list[Record]:
    """Records that neither they nor what continues them was used since then, children before parents."""
    everything = list(records)
    children = _children(everything)
    last_s: dict[str, float] = {}
    for record in with_what_follows(everything, lambda _: True):
        last_s[record.name] = max([record.used_s, *(last_s[child.name] for child in children[record.name])])
    return with_what_follows(everything, lambda record: last_s[record.name] < unix_s)


def least_recently_used(records: Iterable[Record], num_bytes: int) -> list[Record]:
    """Return records that have at least `num_bytes` together, or else all; children come before parents."""
    everything = {record.name: record for record in records}
    num_children = Counter(record.header.parent for record in everything.values())
    ends = [(record.used_s, name) for name, record in everything.items() if not num_children[name]]
    heapq.heapify(ends)
    chosen: list[Record] = []
    while ends and num_bytes > 0:
        record = everything[heapq.heappop(ends)[1]]
        chosen.append(record)
        num_bytes -= record.file_bytes
        parent = everything.get(record.header.parent)
        if parent is not None:
            num_children[parent.name] -= 1
            if not num_children[parent.name]:
                heapq.heappush(ends, (parent.used_s, parent.name))
    return chosen


def _children(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the name of the one that they continue."""
    children: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        children[record.header.parent].append(record)
    return children
