"""Which decoding rows step together. Knows lengths only.

A batch cache pads every row on the left to the longest one. Rows of very different length therefore decode in
separate groups: a group's padding stays under a quarter of its live tokens, or under one allocation step a row,
below which padding costs nothing because buffers grow by that step anyway.
"""

from collections.abc import Collection, Iterable, Sequence

from ..core.memory import ALLOCATION_STEP

MAX_PADDING_SHARE = 0.25
MERGE_PADDING_SHARE = 0.125  # two groups become one only well under the limit, so that they do not part again soon

_REGROUP_INTERVAL = 64  # steps between looks at whether groups may merge, where no row came or went

Lengths = dict[int, int]  # row id -> tokens
Group = tuple[int, ...]


class DecodeGroups:
    """The groups of one step after the other."""

    def __init__(self, *, can_batch: bool):
        self._shared: list[Group] = []  # all but the rows that decode alone whatever the others do
        self._can_batch = can_batch
        self._apart: set[int] = set()
        self._num_plans = 0

    def plan(self, lengths: Lengths, alone: Collection[int] = ()) -> list[Group]:
        """The groups of this step, over exactly these rows. Rows in `alone` join no other row in this step."""
        self._num_plans += 1
        grouped = {row for group in self._shared for row in group}
        apart = self._apart.union(row for row in alone if row not in grouped)
        shared = {row: length for row, length in lengths.items() if self._can_batch and row not in apart}
        has_changed = shared.keys() != grouped
        if has_changed or (len(self._shared) > 1 and self._num_plans % _REGROUP_INTERVAL == 0):
            self._shared = regroup(self._shared, shared)
        return [*self._shared, *((row,) for row in lengths if row not in shared)]

    def padded(self, lengths: Lengths) -> Lengths:
        """Of the rows that stand in groups: each at the length of the longest of its group."""
        present = ([row for row in group if row in lengths] for group in self._shared)
        longest = ((rows, max(lengths[row] for row in rows)) for rows in present if rows)
        return {row: length for rows, length in longest for row in rows}

    def is_apart(self, row: int) -> bool:
        return row in self._apart

    def set_apart(self, row: int) -> None:
        """To decode alone until it is forgotten."""
        self._apart.add(row)

    def leave(self, row: int) -> None:
        """It gives up its place in a group; it stays apart if it was."""
        left = (tuple(member for member in group if member != row) for group in self._shared)
        self._shared = [group for group in left if group]

    def forget(self, row: int) -> None:
        """It has ended."""
        self._apart.discard(row)


def padding(lengths: Sequence[int]) -> int:
    """Slots that hold no token when rows of these lengths share a batch cache."""
    return len(lengths) * max(lengths, default=0) - sum(lengths)


def fits(lengths: Sequence[int], share: float = MAX_PADDING_SHARE) -> bool:
    free = ALLOCATION_STEP * len(lengths) if share == MAX_PADDING_SHARE else ALLOCATION_STEP * len(lengths) // 2
    return padding(lengths) <= max(share * sum(lengths), free)


def regroup(groups: Iterable[Group], lengths: Lengths) -> list[Group]:
    """New groups over exactly the rows of `lengths`, changing as few of the old ones as the padding limit allows.

    Rows that `groups` does not name join the group they pad least, or form new ones.
    """
    kept: list[Group] = []
    for group in groups:
        alive = tuple(row for row in group if row in lengths)
        if alive:
            kept += [alive] if fits([lengths[row] for row in alive]) else _partition(alive, lengths)
    placed = {row for group in kept for row in group}
    kept = _join(kept, [row for row in lengths if row not in placed], lengths)
    return _merge(kept, lengths)


def _partition(rows: Iterable[int], lengths: Lengths) -> list[Group]:
    """Longest first, each row goes to the newest group while that group still fits."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if groups and fits([lengths[member] for member in (*groups[-1], row)]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [tuple(group) for group in groups]


def _join(groups: list[Group], rows: list[int], lengths: Lengths) -> list[Group]:
    joined, alone = list(groups), []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        costs = []
        for index, group in enumerate(joined):
            members = [lengths[member] for member in group]
            if fits([*members, lengths[row]]):
                costs.append((padding([*members, lengths[row]]) - padding(members), index))
        if costs:
            index = min(costs)[1]
            joined[index] = (*joined[index], row)
        else:
            alone.append(row)
    return joined + _partition(alone, lengths)


def _merge(groups: list[Group], lengths: Lengths) -> list[Group]:
    """One forward pass reads all weights: neighbours in length become one group where that costs little padding."""
    ordered = sorted(groups, key=lambda group: -max(lengths[row] for row in group))
    merged: list[Group] = []
    for group in ordered:
        union = (*merged[-1], *group) if merged else group
        if merged and fits([lengths[row] for row in union], MERGE_PADDING_SHARE):
            merged[-1] = union
        else:
            merged.append(group)
    return merged
