"""Decides what the next step runs. Pure: no mlx, no clock, no text.

First come, first served. A sequence waits, is admitted when a place and memory are free, prefills in chunks up to
one token short of its end, and decodes. Under memory pressure the youngest running sequence goes back to the front
of the queue and later computes its state again from its own tokens, which gives the same continuation.
"""

from collections import deque
from collections.abc import Iterable

from ..core.config import EngineConfig
from ..core.errors import VLLMMLXError
from ..core.events import FinishReason
from ..core.memory import MemoryBudget, RowFootprint
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import PrefillChunk, SequenceUpdate, StepOutput, StepPlan, TokenOutput
from .grouping import Group, regroup
from .pacing import MIN_CHUNK, PrefillPacer

RESERVED_OUTPUT = 2048  # tokens of reply that admission sets memory aside for; preemption stands behind it
_REGROUP_INTERVAL = 64  # steps between looks at whether groups may merge, where no row came or went


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: MemoryBudget,
        footprint: RowFootprint,
        pacer: PrefillPacer,
        can_batch: bool = True,
    ):
        self._max_num_seqs = config.max_num_seqs
        self._memory = memory
        self._footprint = footprint
        self._pacer = pacer
        self._can_batch = can_batch
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # in order of admission: the last is the youngest
        self._groups: list[Group] = []
        self._release: list[int] = []
        self._num_steps = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._release)

    def live_bytes(self) -> int:
        """Bytes of all live rows, their padding included, prefilling ones at their full prompt."""
        return self._row_bytes(extra=0)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def abort(self, seq_id: int) -> bool:
        """Forget a sequence, wherever it is. False if it was not here (any more)."""
        seq = self._find(seq_id)
        if seq is None:
            return False
        self._finish(seq, FinishReason.ABORT)
        return True

    def abort_all(self) -> list[int]:
        seq_ids = [seq.seq_id for seq in (*self._running.values(), *self._waiting)]
        for seq_id in seq_ids:
            self.abort(seq_id)
        return seq_ids

    def schedule(self) -> StepPlan:
        self._num_steps += 1
        if not self._preempt_if_short():
            self._admit()
        groups = self._plan_decode()
        prefill = self._plan_prefill(decoding=bool(groups))
        release, self._release = tuple(self._release), []
        return StepPlan(decode=groups, prefill=prefill, release=release)

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        for timing in output.chunk_timings:
            self._pacer.observe_chunk(timing)
        if output.decode_s is not None:
            self._pacer.observe_decode(output.decode_s)
        updates = [self._fail(seq_id, error) for seq_id, error in output.failed]
        updates += self._progress(seq_id for seq_id, _ in output.prefilled)
        updates += self._take_tokens(output.tokens)
        return [update for update in updates if update is not None]

    # -- admission and memory

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            seq = self._waiting[0]
            expected = seq.num_tokens + min(RESERVED_OUTPUT, seq.max_tokens - seq.num_output_tokens)
            needed = self._footprint.bytes_at(expected)
            if self._running and self._row_bytes(extra=0) + needed > self._memory.rows_bytes:
                return
            self._waiting.popleft()
            self._running[seq.seq_id] = seq
            ready = seq.num_computed_tokens >= seq.prefill_end
            seq.status = SequenceStatus.DECODING if ready else SequenceStatus.PREFILLING

    def _preempt_if_short(self) -> bool:
        """True if a row had to give its memory back."""
        preempted = False
        while len(self._running) > 1 and self._row_bytes(extra=1) > self._memory.rows_bytes:
            seq = next(reversed(self._running.values()))
            del self._running[seq.seq_id]
            self._groups = [tuple(row for row in group if row != seq.seq_id) for group in self._groups]
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = 0
            seq.num_preemptions += 1
            self.num_preemptions += 1
            self._release.append(seq.seq_id)
            self._waiting.appendleft(seq)
            preempted = True
        return preempted

    def _row_bytes(self, *, extra: int) -> int:
        """Bytes of all running rows once each decoding row has grown by `extra` tokens."""
        grouped = {row for group in self._groups for row in group}
        total = 0
        for group in self._groups:
            lengths = [self._running[row].num_computed_tokens for row in group if row in self._running]
            if lengths:
                total += len(lengths) * self._footprint.bytes_at(max(lengths) + extra)
        for seq in self._running.values():
            if seq.seq_id not in grouped:
                total += self._footprint.bytes_at(seq.num_tokens + extra)
        return total

    # -- planning

    def _plan_decode(self) -> tuple[tuple[Sequence, ...], ...]:
        rows = {
            seq.seq_id: seq
            for seq in self._running.values()
            if seq.status is SequenceStatus.DECODING and seq.num_output_tokens + seq.num_in_flight < seq.max_tokens
        }
        if not self._can_batch:
            self._groups = [(seq_id,) for seq_id in rows]
        elif rows.keys() != {row for group in self._groups for row in group} or (
            len(self._groups) > 1 and self._num_steps % _REGROUP_INTERVAL == 0
        ):
            self._groups = regroup(self._groups, {row: seq.num_computed_tokens for row, seq in rows.items()})
        for seq in rows.values():
            seq.num_computed_tokens += 1
        return tuple(tuple(rows[row] for row in group) for group in self._groups)

    def _plan_prefill(self, *, decoding: bool) -> tuple[PrefillChunk, ...]:
        """The oldest prompt gets at least half of the step; prompts that fit in what is left ride along whole."""
        queue = [seq for seq in self._running.values() if seq.status is SequenceStatus.PREFILLING]
        if not queue:
            return ()
        budget_s = self._pacer.step_budget_s(decoding=decoding)
        riders, spent_s = [], 0.0
        for seq in queue[1:]:
            num_left = seq.prefill_end - seq.num_computed_tokens
            cost_s = self._pacer.chunk_s(num_left)
            if num_left <= self._pacer.chunk_tokens(budget_s) and spent_s + cost_s <= budget_s / 2:
                riders.append((seq, num_left))
                spent_s += cost_s
        chunks = [self._chunk(queue[0], self._pacer.chunk_tokens(budget_s - spent_s))]
        chunks += [self._chunk(seq, num_tokens) for seq, num_tokens in riders]
        spent_s += self._pacer.chunk_s(chunks[0].end - chunks[0].start)
        rest = [seq for seq in queue[1:] if seq.status is SequenceStatus.PREFILLING]
        for seq in rest:  # the head took less than its share
            num_tokens = self._pacer.chunk_tokens(budget_s - spent_s)
            if spent_s + self._pacer.chunk_s(MIN_CHUNK) > budget_s:
                break
            chunk = self._chunk(seq, num_tokens)
            spent_s += self._pacer.chunk_s(chunk.end - chunk.start)
            chunks.append(chunk)
        return tuple(chunks)

    def _chunk(self, seq: Sequence, max_tokens: int) -> PrefillChunk:
        start = seq.num_computed_tokens
        end = min(seq.prefill_end, start + max_tokens)
        seq.num_computed_tokens = end
        if end == seq.prefill_end:
            seq.status = SequenceStatus.DECODING
        return PrefillChunk(seq, start, end)

    # -- results

    def _take_tokens(self, outputs: Iterable[TokenOutput]) -> list[SequenceUpdate]:
        taken: dict[int, list[TokenOutput]] = {}
        touched: dict[int, Sequence] = {}
        for output in outputs:
            seq = touched.get(output.seq_id) or self._find(output.seq_id)
            if seq is None or seq.status is SequenceStatus.FINISHED:
                continue  # it ended while this sample was in flight
            touched[seq.seq_id] = seq
            taken.setdefault(seq.seq_id, []).append(output)
            seq.output_token_ids.append(output.token_id)
            if output.token_id in seq.stop_token_ids:
                seq.stop_token_id = output.token_id
                self._finish(seq, FinishReason.STOP)
            elif seq.num_output_tokens >= seq.max_tokens:
                self._finish(seq, FinishReason.LENGTH)
        return [_news(seq, tuple(taken[seq_id])) for seq_id, seq in touched.items()]

    def _progress(self, seq_ids: Iterable[int]) -> list[SequenceUpdate]:
        return [_news(self._running[seq_id]) for seq_id in seq_ids if seq_id in self._running]

    def _fail(self, seq_id: int, error: VLLMMLXError) -> SequenceUpdate | None:
        if not self.abort(seq_id):
            return None
        return SequenceUpdate(seq_id=seq_id, error=error)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if self._running.pop(seq.seq_id, None) is not None:
            self._release.append(seq.seq_id)
        else:
            self._waiting.remove(seq)

    def _find(self, seq_id: int) -> Sequence | None:
        seq = self._running.get(seq_id)
        return seq or next((seq for seq in self._waiting if seq.seq_id == seq_id), None)


def _news(seq: Sequence, tokens: tuple[TokenOutput, ...] = ()) -> SequenceUpdate:
    return SequenceUpdate(
        seq_id=seq.seq_id,
        tokens=tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        finish_reason=seq.finish_reason,
        stop_token_id=seq.stop_token_id,
    )
