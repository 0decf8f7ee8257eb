"""The conversations that records form: each is a path of runs from a first token to an end. Knows no files."""

from collections import Counter, defaultdict
from collections.abc import Iterable
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
