"""A shard of a model: several processes, called ranks, each run a part of every layer. It knows no plan and no channel.

Collectives run in the order of their evaluation, so all ranks must evaluate the same work in the same order.
"""

from collections.abc import Sequence as Rows
from typing import Any, Protocol

import mlx.core as mx

from ..cache.layers import LayerCaches
from ..core.errors import ModelLoadError, first_line
from ..core.sequence import Sequence
from ..util.faults import RanksParted
from .model import TextModel


class Lockstep(Protocol):
    """Keeps the loads of all ranks alike."""

    group: mx.distributed.Group

    def exchange(self, what: str, own: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the answer of each rank, by rank. Raises RanksParted if one does not take part in time."""
        ...


PROOF_S = 20.0  # a rank with its own error waits this long for the others, which hang in a collective


class Ranked(TextModel):
    """A text model of which this process has one shard. The ids that decoding rows feed are those of rank 0."""

    def __init__(self, module: Any, lockstep: Lockstep):
        self._lockstep = lockstep
        super().__init__(module)
        self.no_drafts = "several ranks run the model, and the tokens that rows feed travel one at a time"

    def decode(self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, caches: LayerCaches) -> mx.array:
        group = self._lockstep.group
        ids = mx.distributed.all_sum(tokens.astype(mx.int32) * (group.rank() == 0), group=group)
        mx.async_eval(ids)  # type: ignore[no-untyped-call]  # the first collective of the pass on every rank
        return super().decode(seqs, positions, ids, caches)

    def agree(self, likeness: float, error: Exception | None) -> float:
        rank = self._lockstep.group.rank()
        failure = None if error is None else f"{rank} alone: {type(error).__name__}: {first_line(error, 200)}"
        try:
            told = self._lockstep.exchange("proof", [likeness, failure], PROOF_S)
        except RanksParted:
            if failure is None:
                raise
            told = [[0.0, failure], [0.0, None]]  # the others hang in a collective
        failures = [failure for _, failure in told if failure is not None]
        if 0 < len(failures) < len(told):
            raise ModelLoadError(f"A proof failed on rank {failures[0]}")
        return float(told[0][0])
