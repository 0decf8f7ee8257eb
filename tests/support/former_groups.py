"""How decode groups were chosen while each was a forward pass of its own: by padding alone. Kept to compare with."""

from collections.abc import Collection, Iterable, Sequence

from vllm_mlx.core.memory import ALLOCATION_STEP

_JOIN_SHARE, _MERGE_SHARE = 0.25, 0.125  # padding over tokens
_INTERVAL = 64  # steps between attempts to merge groups while no row joins or leaves
Lengths = dict[int, int]
Group = tuple[int, ...]


class FormerGroups:
    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._num_plans = 0

    def plan(self, lengths: Lengths, alone: Collection[int] = ()) -> list[Group]:
        self._num_plans += 1
        grouped = {row for group in self._groups for row in group}
        if lengths.keys() != grouped or (len(self._groups) > 1 and self._num_plans % _INTERVAL == 0):
            self._groups = _merge(_join(_keep(self._groups, lengths), lengths), lengths)
        return list(self._groups)

    def padded(self, lengths: Lengths) -> Lengths:
        present = ([row for row in group if row in lengths] for group in self._groups)
        return {row: max(lengths[row] for row in rows) for rows in present for row in rows}

    def isolated(self, rows: Iterable[int]) -> frozenset[int]:
        return frozenset(rows)

    def is_isolated(self, row: int) -> bool:
        return False

    def leave(self, row: int) -> None:
        left = (tuple(member for member in group if member != row) for group in self._groups)
        self._groups = [group for group in left if group]

    def forget(self, row: int) -> None:
        pass


def _padding(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths, default=0) - sum(lengths)


def _fits(lengths: Sequence[int], share: float) -> bool:
    return _padding(lengths) <= max(share * sum(lengths), ALLOCATION_STEP * len(lengths) * share / _JOIN_SHARE)


def _keep(groups: Iterable[Group], lengths: Lengths) -> list[Group]:
    alive = (tuple(row for row in group if row in lengths) for group in groups)
    kept: list[Group] = []
    for group in alive:
        if group and _fits([lengths[row] for row in group], _JOIN_SHARE):
            kept.append(group)
        elif group:
            kept += _join([], {row: lengths[row] for row in group})
    return kept


def _join(groups: list[Group], lengths: Lengths) -> list[Group]:
    """Rows without a group, longest first, join the one in which they cause the least padding, or found one."""
    placed = {row for group in groups for row in group}
    joined = list(groups)
    for row in sorted(lengths.keys() - placed, key=lambda row: -lengths[row]):
        costs = []
        for index, group in enumerate(joined):
            members = [lengths[member] for member in group]
            if _fits([*members, lengths[row]], _JOIN_SHARE):
                costs.append((_padding([*members, lengths[row]]) - _padding(members), index))
        if costs:
            joined[min(costs)[1]] += (row,)
        else:
            joined.append((row,))
    return joined


def _merge(groups: list[Group], lengths: Lengths) -> list[Group]:
    merged: list[Group] = []
    for group in sorted(groups, key=lambda group: -max(lengths[row] for row in group)):
        union = (*merged[-1], *group) if merged else group
        if merged and _fits([lengths[row] for row in union], _MERGE_SHARE):
            merged[-1] = union
        else:
            merged.append(group)
    return merged
