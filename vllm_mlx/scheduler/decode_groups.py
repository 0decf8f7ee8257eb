"""Decides which rows form a group, whose KV lies together. It knows the lengths of rows only.

A batch cache pads every row on the left to the longest one, and attention reads the padding. Rows of very different
lengths are therefore in separate groups. Where each group is a separate forward pass, the padding of a group stays
below a quarter of its tokens, or below one allocation step per row. Padding below that step costs nothing, because
buffers grow by that step anyway.

Where all groups share one forward pass, a merge saves no more than a few kernels a layer and step. A row then begins
as a separate group, for which nothing is copied. Two groups merge if reading the padding costs less than that in
each step, and once their kernels have cost as much as the copy would: that is at most twice the cost of the best
choice, however long the rows live. They stay as they are where the padding would take more than half of the free
memory, so that no row is preempted for it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

from ..core.memory import ALLOCATION_STEP, RowFootprint

# No Mac has verified these limits, nor those below.
MAX_PADDING_SHARE = 0.25
MERGE_PADDING_SHARE = 0.125  # two groups merge only well below the limit, so that they do not split again soon

_REGROUP_INTERVAL = 64  # steps between attempts to merge groups while no row joins or leaves
# KV of a layer that can be copied in the time that the kernels of one more group take in a layer and step. By the
# device model of the tests it lies between 0.5 MB (M4) and 8.5 MB (M1 Ultra), and the choice matters little.
_BYTES_PER_STEP = 2 << 20
_PARKED = 64  # plans without drafts after which a row may merge with others again
_LONGEST_WAIT = 64  # steps; groups that would wait longer do not merge
READ_BYTES = 2 * _BYTES_PER_STEP  # padding that is read in the time of such a copy, which reads and writes
_MOST_PADDING = 0.5  # groups merge below this part of READ_BYTES, and divide only beyond all of it
# Above this length, MLX reads KV once for 8 heads if there is no mask. Rows of different lengths need a mask, so
# they do not merge then.
_LONGEST_MASKED = 8192

Lengths = dict[int, int]  # row id -> tokens
Group = tuple[int, ...]
Fits = Callable[[Sequence[int]], bool]  # whether rows of these lengths may be a group


class DecodeGroups:
    """The decode groups, kept from one step to the next."""

    def __init__(self, footprint: RowFootprint, can_batch: bool, shares_forward: bool):
        self.shared: list[Group] = []  # all groups but those of isolated rows
        self.has_merged = False  # whether groups were put together in the last plan
        self._formed: dict[Group, int] = {}  # plans before each of them was formed
        self._footprint = footprint
        self._can_batch = can_batch
        self._shares_forward = shares_forward
        self._isolated: set[int] = set()
        self._drafted: dict[int, int] = {}  # by row: the last plan in which it had drafts
        self._num_plans = 0

    def plan(
        self, lengths: Lengths, free_bytes: Callable[[], float] = lambda: math.inf, drafting: Iterable[int] = ()
    ) -> list[Group]:
        """Plan the groups of this step for exactly these rows. `free_bytes`: memory that all rows leave free.

        Each row of `drafting` is alone in its group, and stays so for a while: undoing tokens there moves nothing.
        """
        self._num_plans += 1
        self.has_merged = False
        for row in drafting:
            self._drafted[row] = self._num_plans
            if (row,) not in self.shared:
                self.leave(row)
        shared = {row: length for row, length in lengths.items() if self._can_batch and row not in self._isolated}
        if self._shares_forward:
            kept, new = _kept(self.shared, shared, self._pays)
            self.shared = self._merge_two([*kept, *((row,) for row in new)], shared, free_bytes)
            self._formed = {group: self._formed.get(group, self._num_plans) for group in self.shared}
        elif self._is_due(shared.keys()):
            self.shared, self.has_merged = regroup(self.shared, shared), True
        return [*self.shared, *((row,) for row in lengths if row not in shared)]

    def _is_due(self, rows: Collection[int]) -> bool:
        """Return whether rows have joined or left, or groups may merge by now."""
        may_merge = len(self.shared) > 1 and self._num_plans % _REGROUP_INTERVAL == 0
        return may_merge or rows != {row for group in self.shared for row in group}

    @property
    def merged(self) -> frozenset[int]:
        """The rows whose group has others."""
        return frozenset(row for group in self.shared if len(group) > 1 for row in group)

    def isolated(self, rows: Iterable[int]) -> frozenset[int]:
        """Return the rows whose group shares no forward pass with another group."""
        if self._shares_forward and self._can_batch:
            return frozenset(self._isolated.intersection(rows))
        return frozenset(rows)

    def _merge_two(self, groups: list[Group], lengths: Lengths, free_bytes: Callable[[], float]) -> list[Group]:
        """Merge the two groups of similar length whose copy is the smallest, once it pays."""
        if len(groups) < 2:
            return groups
        parked = self._num_plans - _PARKED
        resting = [group for group in groups if all(self._drafted.get(row, parked) <= parked for row in group)]
        ordered = sorted(resting, key=lambda group: max(lengths[row] for row in group))
        own = {group: [lengths[row] for row in group] for group in ordered}
        pairs = [(self._steps_to_merge(own[a], own[b]), a, b) for a, b in pairwise(ordered)]
        steps, a, b = min(pairs, default=(math.inf, (), ()))
        waited = self._num_plans - max(self._formed.get(group, self._num_plans) for group in (a, b))
        if steps > min(waited, _LONGEST_WAIT):
            return groups
        if 2 * self._padded_bytes(own[a], own[b]) > free_bytes():
            return groups
        self.has_merged = True
        return [*(group for group in groups if group not in (a, b)), (*a, *b)]

    def _steps_to_merge(self, lengths: Sequence[int], others: Sequence[int]) -> float:
        """Return the steps after which a merge of rows of these lengths has saved the cost of its copy."""
        union = (*lengths, *others)
        padding_share = self._reading(union) - self._reading(lengths) - self._reading(others)
        needs_mask = max(union) > _LONGEST_MASKED and padding(union) > 0
        if padding_share > _MOST_PADDING or needs_mask:
            return math.inf
        return len(union) * self._layer_bytes(max(union)) / _BYTES_PER_STEP / (1 - padding_share)

    def _pays(self, lengths: Sequence[int]) -> bool:
        """Return whether reading the padding of a group costs no more than a group for each row would."""
        return self._reading(lengths) <= len(lengths) - 1

    def _reading(self, lengths: Sequence[int]) -> float:
        """Return the time in which a layer's padding is read, as a multiple of the time of one more group's kernels."""
        longest = self._layer_bytes(max(lengths))
        return sum(longest - self._layer_bytes(length) for length in lengths) / READ_BYTES

    def _layer_bytes(self, num_tokens: int) -> float:
        row = self._footprint
        return (row.copy_bytes(num_tokens) - row.fixed_bytes) / row.num_layers

    def _padded_bytes(self, *groups: Sequence[int]) -> int:
        """Return the bytes by which rows of these lengths grow if the groups become one."""
        longest = max(map(max, groups))
        bytes_at = self._footprint.bytes_at
        return sum(len(lengths) * (bytes_at(longest) - bytes_at(max(lengths))) for lengths in groups)

    def is_isolated(self, row: int) -> bool:
        return row in self._isolated

    def isolate(self, row: int) -> None:
        """Let this row decode in a separate batch from now on."""
        self._isolated.add(row)

    def leave(self, row: int) -> None:
        """Remove a row from its group. An isolated row stays isolated."""
        left = (tuple(member for member in group if member != row) for group in self.shared)
        self.shared = [group for group in left if group]

    def forget(self, row: int) -> None:
        """Forget a row that has ended."""
        self._isolated.discard(row)
        self._drafted.pop(row, None)


def padding(lengths: Sequence[int]) -> int:
    """Return the number of slots without a token if rows of these lengths share a batch cache."""
    return len(lengths) * max(lengths, default=0) - sum(lengths)


def fits(lengths: Sequence[int], share: float = MAX_PADDING_SHARE) -> bool:
    free = ALLOCATION_STEP * len(lengths) if share == MAX_PADDING_SHARE else ALLOCATION_STEP * len(lengths) // 2
    return padding(lengths) <= max(share * sum(lengths), free)


def regroup(groups: Iterable[Group], lengths: Lengths) -> list[Group]:
    """Group exactly the rows of `lengths`, changing as few of the old groups as the padding limit allows.

    New rows join the group in which they cause the least padding, or form new groups.
    """
    kept, new = _kept(groups, lengths)
    return _merge(_join(kept, new, lengths), lengths)


def _kept(groups: Iterable[Group], lengths: Lengths, fits: Fits = fits) -> tuple[list[Group], list[int]]:
    """Return the groups without the rows that have left, divided where padding exceeds the limit; and the new rows."""
    kept: list[Group] = []
    for group in groups:
        alive = tuple(row for row in group if row in lengths)
        if alive:
            kept += [alive] if fits([lengths[row] for row in alive]) else _partition(alive, lengths, fits)
    placed = {row for group in kept for row in group}
    return kept, [row for row in lengths if row not in placed]


def _partition(rows: Iterable[int], lengths: Lengths, fits: Fits = fits) -> list[Group]:
    """Put rows, longest first, into the newest group as long as it fits, and then into a new one."""
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
    """Merge groups of similar length if that costs little padding, because each forward pass reads all weights."""
    ordered = sorted(groups, key=lambda group: -max(lengths[row] for row in group))
    merged: list[Group] = []
    for group in ordered:
        union = (*merged[-1], *group) if merged else group
        if merged and fits([lengths[row] for row in union], MERGE_PADDING_SHARE):
            merged[-1] = union
        else:
            merged.append(group)
    return merged
