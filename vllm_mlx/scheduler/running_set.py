"""The sequences that wait and run, and the decisions about them since the last plan."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.sequence import Sequence, SequenceStatus
from ..core.step import Capture, Restore, StepOutput
from ..util.faults import MAX_FAULTS


@dataclass(slots=True)
class Pending:
    """Decisions that the next plan hands to the runner, and news that no client has received yet."""

    release: list[int] = field(default_factory=list)  # seq_ids whose state is dropped
    captures: list[Capture] = field(default_factory=list)  # captures of rows that leave
    restores: list[Restore] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # admitted for the first time, not reported yet
    ended: list[Sequence] | None = None  # ended in the update that is being computed; None between updates

    def drop(self, seq_id: int) -> None:
        """Release a row, and cancel its restore: the runner restores rows only after it has released others."""
        self.release.append(seq_id)
        self.restores = [restore for restore in self.restores if restore.seq.seq_id != seq_id]


class RunningSet:
    """Owns the order of waiting and of running sequences. A running sequence has a row, unless it is drained.

    A drained sequence has nothing left to compute: its last sample is in flight, and its state is released already.
    """

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.by_id: dict[int, Sequence] = {}  # those that run, in order of admission, the youngest last
        self._drained: set[int] = set()

    def __len__(self) -> int:
        """Return the number of running sequences."""
        return len(self.by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """Return the running sequences, the youngest last."""
        return iter(self.by_id.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.by_id

    def rows(self) -> list[Sequence]:
        """Return the running sequences that hold state, the youngest last."""
        return [seq for seq in self.by_id.values() if seq.seq_id not in self._drained]

    def prefilling(self) -> list[Sequence]:
        return [seq for seq in self.by_id.values() if seq.status is SequenceStatus.PREFILLING]

    def decoding(self) -> list[Sequence]:
        return [seq for seq in self.rows() if seq.status is SequenceStatus.DECODING]

    def find(self, seq_id: int) -> Sequence | None:
        return self.by_id.get(seq_id) or next((seq for seq in self.waiting if seq.seq_id == seq_id), None)

    def admit(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.by_id[seq.seq_id] = seq

    def take_chunks(self, output: StepOutput) -> Iterator[tuple[Sequence, bool]]:
        """Take the log-probabilities of prompts, and yield each row that ran a chunk, and whether it needs no more."""
        for scored in output.scored:
            seq = self.by_id.get(scored.seq_id)
            if seq is not None and not seq.is_scored:  # a client may read those that are complete
                seq.prompt_logprobs[scored.start : scored.start + len(scored.logprobs)] = scored.logprobs
        for seq_id, end in output.prefilled:
            if (seq := self.by_id.get(seq_id)) is not None:
                yield seq, end == seq.prefill_end and not seq.max_tokens

    def drain(self, seq: Sequence) -> None:
        """Note that the sequence has no row from now on. It runs until its last sample is read."""
        self._drained.add(seq.seq_id)

    def requeue(self, seq: Sequence) -> bool:
        """Move a running sequence to the front of the waiting ones. Returns whether it had a row."""
        self.waiting.appendleft(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        return self._stop(seq)

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence. Returns whether it had a row."""
        if seq.seq_id in self.by_id:
            return self._stop(seq)
        self.waiting.remove(seq)
        return False

    def count_fault(self) -> list[Sequence]:
        """Count a device fault for all rows. Returns the rows that have had too many since their last token."""
        for seq in self:
            seq.num_faults += 1
        return [seq for seq in self if seq.num_faults >= MAX_FAULTS]

    def _stop(self, seq: Sequence) -> bool:
        del self.by_id[seq.seq_id]
        had_row = seq.seq_id not in self._drained
        self._drained.discard(seq.seq_id)
        return had_row
