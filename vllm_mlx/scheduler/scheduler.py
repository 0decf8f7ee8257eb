"""Decides what the next step runs. Pure: no mlx, no clock, no text.

First come, first served, and tenants take turns. A sequence waits, is admitted when a place and memory are free,
prefills in chunks up to one token short of its end, and decodes. Under memory pressure the youngest running sequence
of the tenant that has most goes back to the front of the queue; it resumes from what the prefix cache kept of it and
computes the rest again from its own tokens, which gives the same continuation. Cached state yields to live rows: it is
evicted before anything waits or is preempted.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

from ..core.config import EngineConfig
from ..core.errors import VLLMMLXError
from ..core.events import FinishReason
from ..core.memory import MemoryBudget, RowFootprint
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import Capture, PrefillChunk, Restore, SequenceUpdate, StepOutput, StepPlan, TokenOutput
from .grouping import DecodeGroups
from .pacing import PrefillPacer
from .pool import Pool
from .prefix import PrefixCache
from .turns import Turns
from .work import Groups, plan_prefill, plan_work

RESERVED_OUTPUT = 2048  # tokens of reply that admission sets memory aside for; preemption stands behind it


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: MemoryBudget,
        footprint: RowFootprint,
        pacer: PrefillPacer,
        can_batch: bool = True,
        prefix_cache: PrefixCache | None = None,
    ):
        self._max_num_seqs = config.max_num_seqs
        self.pool = Pool(memory, pacer)
        self._footprint = footprint
        self._pacer = pacer
        self._prefix_cache = prefix_cache
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # in order of admission: the last is the youngest
        self._turns = Turns(lambda row: footprint.bytes_at(max(row.num_tokens, row.num_computed_tokens)))
        self._groups = DecodeGroups(can_batch=can_batch)
        self._release: list[int] = []
        self._captures: list[Capture] = []  # of rows that leave
        self._restores: list[Restore] = []
        self._drained: set[int] = set()  # running, but nothing is left to launch: their last sample is in flight
        self._started: list[Sequence] = []  # of this step, not told to anyone
        self._untold: list[Sequence] | None = None  # that ended in an update under way
        self._now = 0.0
        self.num_preemptions = 0
        self.num_restarts = 0  # of rows, after faults that may have been another row's

    @property
    def awaits_inputs(self) -> bool:
        """Whether a row that was to go on in the last step cannot before its images are made ready."""
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self._prefix_cache

    @property
    def has_work(self) -> bool:
        has_trims = self._prefix_cache is not None and self._prefix_cache.has_trims
        return bool(self._waiting or self._running or self._release or has_trims)

    def live_bytes(self) -> int:
        """Bytes of all live rows, their padding included, prefilling ones at their full prompt."""
        return self._row_bytes(extra=0)

    def add(self, seq: Sequence) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.open(seq)
        self._turns.join(seq)
        self._waiting.append(seq)

    def abort(self, seq_id: int) -> bool:
        """Forget a sequence, wherever it is. False if it was not here (any more)."""
        if (seq := self._find(seq_id)) is None:
            return False
        self._finish(seq, FinishReason.ABORT)
        return True

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Only this much of a sequence can serve a later turn: the rest leaves the cache once it has ended."""
        if self._prefix_cache is not None:
            self._prefix_cache.keep(seq, num_tokens)

    def recover(self, error: VLLMMLXError) -> list[SequenceUpdate]:
        """After a step that failed as a whole: no row is left on the device, so nothing is captured or released.

        Whose fault it was is not known. Rows begin again, each apart; where all did so before, or there is one, the
        youngest fails. Where none ran, or what an update took may not have been told, all fails.
        """
        for restore in self._restores:
            restore.release()
        rows = list(self._running.values())
        failing = rows[-1:] if all(self._groups.is_apart(seq.seq_id) for seq in rows) or len(rows) == 1 else []
        ended, self._untold = self._untold, None
        if ended is not None or not rows:
            failing = [*rows, *self._waiting]
        for seq in failing:
            self._finish(seq, FinishReason.ABORT, keep=False)
        self._set_apart([*self._running])
        self._release, self._captures, self._restores, self._started = [], [], [], []
        seq_ids = dict.fromkeys(seq.seq_id for seq in (*failing, *(ended or ())))
        return [SequenceUpdate(seq_id=seq_id, error=error) for seq_id in seq_ids]

    def schedule(self, now: float = 0.0) -> StepPlan:
        """`now` in seconds, from any clock that only goes forward: the cache tells old from new by it."""
        self._now = now
        if self._prefix_cache is not None:
            self._prefix_cache.forget_planned(but=self._captures)
        self._preempt_if_short()
        self._admit()
        favoured = self._turns.favoured(self._running.values(), now)
        work = plan_work(self._decode_groups(favoured), favoured, partial(self._plan_prefill, favoured))
        plan = StepPlan(
            decode=work.decode,
            resting=work.resting,
            prefill=work.prefill,
            release=tuple(self._release),
            captures=tuple(self._captures),
            restores=tuple(self._restores),
        )
        self._release, self._captures, self._restores = [], [], []
        return plan

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        for timing in output.chunk_timings:
            self._pacer.observe_chunk(timing)
        if output.decode_s is not None:
            self._pacer.observe_decode(output.decode_s)
        self.pool.observe(output)
        self._turns.charge(output, self._running)
        self._untold = []
        self._store(output)
        self._set_apart(output.suspects)
        updates = [self._fail(seq_id, error) for seq_id, error in output.failed]
        updates += self._tell_started()
        prefilled = (seq_id for seq_id, _ in output.prefilled)
        updates += [SequenceUpdate.of(self._running[seq_id]) for seq_id in prefilled if seq_id in self._running]
        updates += self._take_tokens(output.tokens)
        self._untold = None
        return [update for update in updates if update is not None]

    # -- admission and memory

    def _admit(self) -> None:
        """Admit sequences in turn while places and memory last. One that shares a running prefill waits for it."""
        following: set[int] = set()
        while (seq := self._turns.next(self._waiting, self._running.values(), following)) is not None:
            is_full = len(self._running) >= self._max_num_seqs or (self.pool.is_crowded and self._running)
            if is_full and not self._turns.are_taken:
                return
            if self._follows_another(seq):
                following.add(seq.seq_id)
                continue
            if not self._make_room(seq):
                return
            rows_bytes = self._row_bytes(extra=0)
            self._waiting.remove(seq)
            self._running[seq.seq_id] = seq
            self._start(seq)
            self._shrink_cache(rows_bytes + self._footprint.bytes_at(seq.num_tokens))

    def _make_room(self, seq: Sequence) -> bool:
        """Whether there is a place and memory, after rows of a tenant that has more than this one went back in line."""
        num_tokens = seq.num_tokens + min(RESERVED_OUTPUT, seq.max_tokens - seq.num_output_tokens)
        coming_bytes = self._footprint.bytes_at(num_tokens)
        leaving = self._turns.rows_above(
            seq,
            [row for row in self._rows() if row not in self._started],
            coming_bytes=coming_bytes,
            lacking_places=len(self._running) + 1 - self._max_num_seqs,
            lacking_bytes=self._row_bytes(extra=0) + coming_bytes - self.pool.num_bytes,
            is_crowded=self.pool.is_crowded,
            num_running=len(self._running),
        )
        for row in leaving or ():
            self._preempt(row)
        return leaving is not None

    def _rows(self) -> list[Sequence]:
        """Those that hold state, the youngest last."""
        return [seq for seq in self._running.values() if seq.seq_id not in self._drained]

    def _start(self, seq: Sequence) -> None:
        if seq.scheduled_s is None:
            seq.scheduled_s = self._now
        if self._prefix_cache is not None:
            restore = self._prefix_cache.resume(seq, self._now)
            if restore is not None:
                self._restores.append(restore)
        if not seq.num_preemptions:
            self._started.append(seq)
        ready = seq.num_computed_tokens >= seq.prefill_end
        seq.status = SequenceStatus.DECODING if ready else SequenceStatus.PREFILLING

    def _follows_another(self, seq: Sequence) -> bool:
        """Whether a prefill under way, or a row that just left, will soon hold more of this prompt than the cache does.

        The common length becomes a point of that prefill, and this sequence resumes from it; if the leader ends
        before, the first that waited leads.
        """
        cache = self._prefix_cache
        if cache is None:
            return False
        if any(cache.awaits(seq, capture) for capture in self._captures):
            return True
        leaders = [leader for leader in self._running.values() if leader.status is SequenceStatus.PREFILLING]
        return any(cache.follow(seq, leader) for leader in leaders)

    def _preempt_if_short(self) -> None:
        """Memory for the next step: cached state goes first, then rows give up their places."""
        needed = self._row_bytes(extra=1)
        self.pool.use(needed + self._kept_bytes())
        while needed > self.pool.num_bytes:
            rows = self._rows()
            if len(rows) < 2:
                break
            self._preempt(self._turns.row_to_preempt(rows))
            self.pool.crowd()
            needed = self._row_bytes(extra=1)
        self._shrink_cache(needed)

    def _preempt(self, seq: Sequence) -> None:
        self._return_to_line(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _return_to_line(self, seq: Sequence, *, keep: bool = True) -> None:
        """To its front, to go on from what is kept."""
        del self._running[seq.seq_id]
        self._waiting.appendleft(seq)
        self._groups.leave(seq.seq_id)
        if seq.seq_id not in self._drained:
            self._leave(seq, keep=keep)
        self._drained.discard(seq.seq_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0

    def _set_apart(self, seq_ids: Collection[int]) -> None:
        """Rows whose state is lost to a fault begin again, none with another: who is at fault will fail alone."""
        for seq in [*self._waiting, *self._running.values()]:
            if seq.seq_id in seq_ids:
                self._groups.set_apart(seq.seq_id)
        for seq in reversed([seq for seq in self._running.values() if seq.seq_id in seq_ids]):
            if seq not in self._started:  # else it is counted and told as if it had not been here yet
                seq.num_preemptions += 1
            self._return_to_line(seq, keep=False)
            self.pool.relieve()
            self.num_restarts += 1

    def _leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """A row gives up its place: what the cache lacks of its progress is captured first."""
        self._release.append(seq.seq_id)
        if self._prefix_cache is not None and keep:
            self._shrink_cache(self._row_bytes(extra=1))  # what the row held is free for its copy
            capture = self._prefix_cache.plan_capture(seq, min(seq.num_computed_tokens, seq.num_tokens))
            if capture is not None:
                self._captures.append(capture)

    def _shrink_cache(self, rows_bytes: int) -> None:
        """Keep cached state within what live rows leave of the pool."""
        if self._prefix_cache is not None:
            self._prefix_cache.shrink_to(max(0, self.pool.num_bytes - rows_bytes))

    def _store(self, output: StepOutput) -> None:
        cache = self._prefix_cache
        if cache is None:
            return
        for snapshot in output.snapshots:
            cache.insert(snapshot, self._now)
        cache.trim_ended()
        for restore in output.failed_restores:
            cache.drop(restore.match, restore.seq)
            self._start_over(restore.seq)

    def _start_over(self, seq: Sequence) -> None:
        """Cached state that could not be used: the row begins from nothing, unnoticed by anyone."""
        if seq.seq_id in self._running:
            self._return_to_line(seq, keep=False)
            seq.num_cached_tokens = seq.num_stored_tokens = 0
            seq.cache_hit_kind = "miss"

    def _kept_bytes(self) -> int:
        """Of the pool, beside live rows."""
        return 0 if self._prefix_cache is None else self._prefix_cache.tree.used_bytes

    def _row_bytes(self, *, extra: int) -> int:
        """Bytes of all running rows once each decoding row has grown by `extra` tokens."""
        lengths = {seq.seq_id: max(seq.num_tokens, seq.num_computed_tokens) for seq in self._rows()}
        lengths |= self._groups.padded({row: seq.num_computed_tokens for row, seq in self._running.items()})
        return sum(self._footprint.bytes_at(length + extra) for length in lengths.values())

    # -- planning

    def _decode_groups(self, favoured: Iterable[Sequence]) -> Groups:
        """All rows that decode. A favoured one joins no group yet."""
        rows = {}
        for seq in self._running.values():
            if seq.status is SequenceStatus.DECODING and seq.seq_id not in self._drained:
                if seq.num_output_tokens + seq.num_in_flight < seq.max_tokens:
                    rows[seq.seq_id] = seq
                else:
                    self._drained.add(seq.seq_id)
                    self._leave(seq)
        lengths = {row: seq.num_computed_tokens for row, seq in rows.items()}
        groups = self._groups.plan(lengths, alone={seq.seq_id for seq in favoured})
        return tuple(tuple(rows[row] for row in group) for group in groups)

    def _plan_prefill(self, favoured: list[Sequence], decode: Groups, resting: Groups) -> tuple[PrefillChunk, ...]:
        queue = [seq for seq in self._running.values() if seq.status is SequenceStatus.PREFILLING]
        budget_s = self._pacer.step_budget_s(decoding=bool(decode), resting=bool(resting))
        budget_s = min(budget_s, self._turns.longest_prefill_s(self._pacer.max_stall_s))
        return plan_prefill(self._turns.in_turn(queue, favoured), self._pacer, self._chunk, budget_s)

    def _chunk(self, seq: Sequence, max_tokens: int) -> PrefillChunk:
        """May be empty."""
        start, cache = seq.num_computed_tokens, self._prefix_cache
        end = self._chunk_end(seq, max_tokens)
        seq.num_computed_tokens = end
        if end == seq.prefill_end:
            seq.status = SequenceStatus.DECODING
        capture = cache.plan_chunk_capture(seq, end) if cache is not None and end > start else None
        return PrefillChunk(seq, start, end, capture)

    def _chunk_end(self, seq: Sequence, max_tokens: int) -> int:
        limit = seq.prefill_end if self._prefix_cache is None else self._prefix_cache.next_point(seq)
        return min(limit, seq.num_computed_tokens + max_tokens)

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
        return [SequenceUpdate.of(seq, tuple(taken[seq_id])) for seq_id, seq in touched.items()]

    def _tell_started(self) -> list[SequenceUpdate]:
        """Once their state is restored, and before a long chunk runs; its tokens do not count yet."""
        started, self._started = self._started, []
        here = [seq for seq in started if seq.seq_id in self._running]
        return [replace(SequenceUpdate.of(seq), num_computed_tokens=seq.num_cached_tokens) for seq in here]

    def _fail(self, seq_id: int, error: VLLMMLXError) -> SequenceUpdate | None:
        if (seq := self._find(seq_id)) is None:
            return None
        self._finish(seq, FinishReason.ABORT, keep=False)
        return SequenceUpdate(seq_id=seq_id, error=error)

    def _finish(self, seq: Sequence, reason: FinishReason, *, keep: bool = True) -> None:
        """`keep` what it computed, for a later turn."""
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if self._untold is not None:
            self._untold.append(seq)
        self.pool.relieve()
        self._turns.leave(seq)
        self._groups.forget(seq.seq_id)
        if self._running.pop(seq.seq_id, None) is not None:
            if seq.seq_id in self._drained:
                self._drained.discard(seq.seq_id)
            else:
                self._leave(seq, keep=keep)
        else:
            self._waiting.remove(seq)
        if self._prefix_cache is not None:
            self._prefix_cache.close(seq)

    def _find(self, seq_id: int) -> Sequence | None:
        return self._running.get(seq_id) or next((seq for seq in self._waiting if seq.seq_id == seq_id), None)
