"""Limits a failure of device work to its row, its batch, or the work of all ranks."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import TypeVar

from ..core.errors import GenerationError, RequestError, VLLMMLXError
from ..core.faults import Fault, RanksParted, device_fault
from ..core.fence import RowFence
from ..core.sequence import Sequence

T = TypeVar("T")


class RowFences:
    """Fences the device work of rows. A failure ends a single row, and makes all rows suspects if there are several."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, VLLMMLXError]] = []
        self.suspects: dict[int, None] = {}  # an ordered set of seq_ids
        self.refused: list[tuple[int, int]] = []  # (seq_id, tokens) of chunks for which the device had no memory

    def run(self, seqs: Rows[Sequence], work: Callable[[], T]) -> T | None:
        with RowFence("rows outside the batch whose device work failed") as fence:
            try:
                return work()
            except RequestError as error:  # not a failure of the server: an image changed at its address
                self.failed += [(seq.seq_id, error) for seq in seqs]
                return None
        if len(seqs) == 1:
            cause = f"{type(fence.error).__name__}: {fence.error}"
            self.failed.append((seqs[0].seq_id, GenerationError(f"The model could not run this request: {cause}")))
        else:
            self.suspect(seqs)
        return None

    def suspect(self, seqs: Iterable[Sequence]) -> None:
        failed = {seq_id for seq_id, _ in self.failed}
        self.suspects.update((seq.seq_id, None) for seq in seqs if seq.seq_id not in failed)


class Unfenced(RowFences):
    """Turns each failure into RanksParted, because the other ranks of the model have not met it, and go on."""

    def run(self, seqs: Rows[Sequence], work: Callable[[], T]) -> T | None:
        try:
            return work()
        except BaseException as error:
            if not isinstance(error, Exception) or device_fault(error) is Fault.PARTED:
                raise
            raise RanksParted(f"This rank failed: {type(error).__name__}: {error}") from error
