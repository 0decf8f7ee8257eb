"""Plans the next step. It is pure: no mlx, no clock, no text.

First come, first served, and tenants take turns. A sequence waits, is admitted when a place and memory are free,
prefills in chunks up to its last token, and decodes. Under memory pressure the youngest row of the tenant that has most
is preempted: it returns to the front of the queue, resumes from the state that the prefix cache has kept, and computes
the rest again from its own tokens, so that it continues the same reply up to rounding. Cached state is evicted before
any sequence has to wait or is preempted.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from ..core.config import EngineConfig
from ..core.errors import GenerationError, VLLMMLXError
from ..core.events import FinishReason
from ..core.memory import MemoryBudget, RowFootprint
from ..core.sequence import PromptInputs, Sequence, SequenceStatus
from ..core.step import Drafts, SequenceUpdate, StepOutput, StepPlan, TokenOutput
from ..util.faults import MAX_FAULTS, Fault
from .ahead import Ahead
from .decode_groups import DecodeGroups
from .image_planner import MLLMScheduler
from .memory_pool import MemoryPool, Room
from .prefill import PrefillPlanner
from .prefill_pacer import PrefillPacer
from .prefix_planner import PrefixPlanner
from .running_set import Pending, RunningSet
from .speculation import MOST, Speculation
from .turns import Turns


class Scheduler:
    """Plans steps and takes in their results. Owns all sequences from `add` until they end."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: MemoryBudget,
        footprint: RowFootprint,
        pacer: PrefillPacer,
        can_batch: bool = True,
        shares_forward: bool = True,
        prefix_cache: PrefixPlanner | None = None,
        images: MLLMScheduler | None = None,
        speculation: Speculation | None = None,
    ):
        """`images` is None for a model that takes none, `speculation` where no drafts are verified."""
        self._max_num_seqs = config.max_num_seqs
        self.pool = MemoryPool(memory, pacer)
        self._footprint = footprint
        self._pacer = pacer
        self.prefix_cache = prefix_cache
        self._images = images
        self._seqs = RunningSet()
        self._pending = Pending()
        self._groups = DecodeGroups(footprint, can_batch and not config.repeatable, shares_forward)
        self.room = Room(config.max_num_seqs, self.pool, footprint, self._seqs, self._groups, prefix_cache, images)
        self.turns = Turns(self.room)
        self.prefill = PrefillPlanner(config, pacer, self.turns, self.room)
        self.speculation = speculation
        self.ahead = Ahead()
        self._now = 0.0
        self.num_preemptions = 0
        self.num_restarts = 0  # restarts of rows after faults that another row may have caused

    @property
    def awaits_inputs(self) -> bool:
        """Return whether a sequence waits for its images, or for state that is being read from disk."""
        if self._images is not None and self._images.awaits_inputs:
            return True
        return self.prefix_cache is not None and self.prefix_cache.is_reading

    @property
    def waiting(self) -> Collection[Sequence]:
        return self._seqs.waiting

    @property
    def num_running(self) -> int:
        return len(self._seqs)

    @property
    def num_replies(self) -> int:
        """Return the number of running sequences of requests."""
        return sum(not seq.is_ahead for seq in self._seqs)

    @property
    def holds_rows(self) -> bool:
        """Return whether the runner may hold state of rows."""
        return bool(self._seqs.by_id or self._pending.release)

    @property
    def has_work(self) -> bool:
        has_trims = self.prefix_cache is not None and self.prefix_cache.has_trims
        return self.holds_rows or bool(self._seqs.waiting) or has_trims

    def add(self, seq: Sequence) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.open(seq)
        self.turns.join(seq)
        self._seqs.waiting.append(seq)

    def abort(self, seq_id: int) -> bool:
        """End a sequence that waits or runs. Returns False if there is none with this id."""
        if (seq := self._seqs.find(seq_id)) is None:
            return False
        self._finish(seq, FinishReason.ABORT)
        return True

    def keep(self, seq: Sequence, num_tokens: int, following: PromptInputs | None = None) -> None:
        """Once the sequence has ended, keep only its first `num_tokens` in the prefix cache.

        Begin with the prompt `following` it when `look_ahead` is called.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.keep(seq, num_tokens)
            if following is not None:
                self.ahead.add(seq, following)

    def look_ahead(self) -> None:
        """Begin to compute the beginning of a next prompt, if it is worth more than the state evicted for it.

        Called while nothing waits or runs.
        """
        while (cache := self.prefix_cache) is not None and (beginning := self.ahead.next) is not None:
            beginning.cut(end := self._known_end(beginning.seq))
            if (num_tokens := end - beginning.position) <= 0:
                continue
            copied = self._footprint.copy_bytes(num_tokens, end)
            needed = copied + self._footprint.bytes_at(end + 1)
            if cache.tree.is_worth(cache.fingerprint, needed, num_tokens=num_tokens, kept_bytes=copied):
                self.add(self.ahead.start(beginning))
                return
            self.ahead.forget(beginning)

    def _known_end(self, seq: Sequence) -> int:
        return seq.prefill_end if self._images is None else self._images.known_end(seq)

    def recover(self, error: VLLMMLXError, fault: Fault | None = None, num_tokens: int = 0) -> list[SequenceUpdate]:
        """Continue after a step that failed as a whole: the device has no rows, so nothing is captured or released.

        All rows restart, unless they failed too often; if results of the step may be lost, all sequences end. After a
        device fault while a chunk of `num_tokens` ran, chunks become shorter. Rows restart isolated if memory is short,
        because an isolated row needs no copies; or if the device is not at fault, so that the culprit fails alone.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.release_matches()
        rows = list(self._seqs)
        ended = self._pending.ended
        failing = [*rows, *self._seqs.waiting] if ended is not None else self._ending(rows, fault)
        if fault is not None:
            self.pool.heed(fault, num_tokens)
        for seq in failing:
            self._finish(seq, FinishReason.ABORT, keep=False)
        self._restart([seq.seq_id for seq in self._seqs], isolated=fault is not Fault.FAILED)
        self._pending = Pending()
        seq_ids = dict.fromkeys(seq.seq_id for seq in (*failing, *(ended or ())) if not seq.is_ahead)
        return self._news([SequenceUpdate(seq_id=seq_id, error=error) for seq_id in seq_ids])

    def _news(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Return the news of requests. A row is usually a request's own."""
        return updates

    def _ending(self, rows: list[Sequence], fault: Fault | None) -> list[Sequence]:
        """Return the sequences that end because a step failed as a whole.

        No row causes a device fault. Otherwise the culprit is unknown: the youngest row ends if all were isolated
        already, and all sequences end if no row ran.
        """
        if fault is not None:
            return self._seqs.count_fault()
        if not rows:
            return list(self._seqs.waiting)
        are_isolated = all(self._groups.is_isolated(seq.seq_id) for seq in rows)
        return rows[-1:] if are_isolated or len(rows) == 1 else []

    def schedule(self, now: float = 0.0, *, is_alone: bool = True, looks_ahead: bool = True) -> StepPlan:
        """Plan the next step. `now` is in seconds, of any monotonic clock; the cache orders entries by it.

        Unless the model `is_alone`, the step waits for its own samples, so that no step of another model does. Unless
        it `looks_ahead`, a beginning of a next prompt leaves.
        """
        self._now = now
        if self._images is not None:
            self._images.begin_step()
        if self.prefix_cache is not None:
            self.prefix_cache.forget_planned(but=self._pending.captures)
        self._preempt_if_short()
        if self.ahead.running is not None:
            self._give_way(self.ahead.running, looks_ahead=looks_ahead and is_alone)
        self._admit()
        if (seq := self.ahead.running) is not None and seq in self._seqs.waiting and not self.awaits_inputs:
            self._finish(seq, FinishReason.ABORT, keep=False)  # the pool lacks the memory
        decode, drafts, reads = self._plan_decode(is_alone=is_alone)
        prefill = self.prefill.plan(self._seqs.prefilling(), now, is_decoding=bool(decode))
        pending, self._pending = self._pending, Pending(admitted=self._pending.admitted)
        if self.speculation is not None and (prefill or pending.release or pending.restores or not decode):
            self.speculation.rest()
        return StepPlan(
            decode=decode,
            isolated=self._groups.isolated([row.seq_id for group in decode for row in group]),
            drafts=drafts,
            reads=reads or (bool(decode) and not is_alone),
            prefill=prefill,
            release=tuple(pending.release),
            captures=tuple(pending.captures),
            restores=tuple(pending.restores),
        )

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take in the results of a step, or of its decode or prefill alone, and return the news for clients."""
        for timing in output.chunk_timings:
            self._pacer.observe_chunk(timing)
        if output.decode_s is not None:
            self._pacer.observe_decode(output.decode_s)
        self._pending.ended = []
        self._store(output)
        if self.pool.observe(output):  # evict now: there may be no next step
            self.room.shrink_cache(self.room.rows_bytes())
        self._restart(output.suspects, isolated=True)
        updates = [self._fail(seq_id, error) for seq_id, error in output.failed]
        updates += [self._run_shorter(seq_id, num_tokens) for seq_id, num_tokens in output.refused]
        updates += self._report_admitted()
        for seq, is_over in self._seqs.take_chunks(output):
            if is_over:
                self._finish(seq, FinishReason.LENGTH)
            updates.append(update_of(seq))
        if self.speculation is not None:
            self.speculation.learn(output)
        updates += self._take_tokens(output.tokens, {verified.seq_id for verified in output.verified})
        self._pending.ended = None
        return self._news([update for update in updates if update is not None and update.seq_id >= 0])  # of requests

    # -- admission and memory

    def _admit(self) -> None:
        """Admit sequences in turn while places and memory last. One that shares a running prefill waits."""
        following: set[int] = set()
        while (seq := self.turns.next(self._seqs.waiting, self._seqs, following)) is not None:
            is_full = len(self._seqs) >= self._max_num_seqs or (self.pool.is_crowded and len(self._seqs) > 0)
            if is_full and not self.turns.are_several:
                return
            if self._follows_another(seq):
                following.add(seq.seq_id)
                continue
            if not self._make_room(seq):
                return
            rows_bytes = self.room.rows_bytes()
            self._seqs.admit(seq)
            self.turns.admit(seq)
            self._start(seq)
            self.room.shrink_cache(rows_bytes + self._footprint.bytes_at(seq.num_tokens))

    def _give_way(self, seq: Sequence, *, looks_ahead: bool) -> None:
        """End the computing of a next prompt if there is other work. Its state stays, so that it can continue."""
        is_alone = len(self._seqs) + len(self._seqs.waiting) == 1
        is_wanted = self.ahead.wants(seq)  # after the cache is cleared it is not, and its state goes as well
        if not (is_wanted and looks_ahead and is_alone and self._known_end(seq) == seq.prefill_end):
            self._finish(seq, FinishReason.ABORT, keep=is_wanted)

    def _make_room(self, seq: Sequence) -> bool:
        """Make room for a sequence, if necessary by preempting rows of tenants that have more. False if that fails."""
        coming_bytes = self.room.coming_bytes(seq)
        if not self.room.has_room_beside(coming_bytes):
            return False
        lacking_places = len(self._seqs) + 1 - self._max_num_seqs
        lacking_bytes = self.room.rows_bytes() + coming_bytes - self.pool.num_bytes
        staying = [row for row in self._seqs.rows() if row not in self._pending.admitted]
        leaving: list[Sequence] = []
        while len(leaving) < len(self._seqs) and (lacking_places > 0 or lacking_bytes > 0 or self.pool.is_crowded):
            row = self.turns.row_above(seq, staying, self.room.share(coming_bytes))
            if row is None:
                return False
            if lacking_places <= 0 and lacking_bytes <= 0:
                break  # memory suffices now; if it becomes short, rows of the tenant that has more are preempted first
            staying.remove(row)
            leaving.append(row)
            lacking_places -= 1
            lacking_bytes -= self.room.bytes_of(row)
        for row in leaving:
            self._preempt(row)
        return True

    def _start(self, seq: Sequence) -> None:
        if seq.scheduled_s is None:
            seq.scheduled_s = self._now
        if self.prefix_cache is not None:
            restore = self.prefix_cache.resume(seq, self._now)
            if not seq.num_preemptions and not seq.is_ahead:
                seq.receipt = replace(seq.receipt, ahead_tokens=self.ahead.use(seq, self.prefix_cache.prompt_key(seq)))
            if restore is not None:
                self._pending.restores.append(restore)
        if not seq.num_preemptions:
            self._pending.admitted.append(seq)
        if self.speculation is not None:
            self.speculation.open(seq)
        is_ready = seq.num_computed_tokens >= seq.prefill_end
        seq.status = SequenceStatus.DECODING if is_ready else SequenceStatus.PREFILLING

    def _follows_another(self, seq: Sequence) -> bool:
        """Return whether a running prefill, a row that just left, or a read will soon cache more of this prompt.

        The common prefix becomes a resume point of that prefill, and this sequence resumes from it. If the leader ends
        earlier, the first sequence that waited becomes the leader.
        """
        cache = self.prefix_cache
        if cache is None:
            return False
        is_coming = any(cache.awaits(seq, capture) for capture in self._pending.captures)
        return is_coming or any(cache.follow(seq, row) for row in self._seqs.prefilling()) or cache.awaits_read(seq)

    def _preempt_if_short(self) -> None:
        """Make memory for the next step: evict cached state first, then preempt rows."""
        needed = self.room.rows_bytes(extra=1)
        self.pool.use(rows_bytes=needed, kept_bytes=self.room.kept_bytes)
        while needed > self.pool.num_bytes:
            if (row := self.turns.row_to_preempt(self._seqs.rows(), self.room.first_beside)) is None:
                break
            self._preempt(row)
            self.pool.crowd()
            needed = self.room.rows_bytes(extra=1)
        self.room.shrink_cache(needed)

    def _preempt(self, seq: Sequence) -> None:
        self._requeue(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence, *, keep: bool = True) -> None:
        """Move a running sequence to the front of the queue. It will resume from the state that is kept."""
        self._groups.leave(seq.seq_id)
        num_computed_tokens = seq.num_computed_tokens
        if self._seqs.requeue(seq):
            self._leave(seq, num_computed_tokens, keep=keep)

    def _restart(self, seq_ids: Collection[int], *, isolated: bool) -> None:
        """Restart rows that lost their state, each `isolated` if the one that causes the fault must fail alone."""
        for seq in [*self._seqs.waiting, *self._seqs]:
            if isolated and seq.seq_id in seq_ids:
                self._groups.isolate(seq.seq_id)
        for seq in reversed([seq for seq in self._seqs if seq.seq_id in seq_ids]):
            if seq not in self._pending.admitted:  # a row admitted in this step does not count as preempted
                seq.num_preemptions += 1
            self._requeue(seq, keep=False)
            self.pool.relieve()
            self.num_restarts += 1

    def _run_shorter(self, seq_id: int, num_tokens: int) -> SequenceUpdate | None:
        """Restart a row with shorter chunks, because the device had no memory. The shortest may fail three times."""
        seq = self._seqs.by_id[seq_id]
        seq.num_faults += not self.pool.heed(Fault.OUT_OF_MEMORY, num_tokens)
        if seq.num_faults < MAX_FAULTS:
            self._restart([seq_id], isolated=False)
            return None
        return self._fail(seq_id, GenerationError("The device has no memory for a prompt of this length now."))

    def _leave(self, seq: Sequence, num_computed_tokens: int, *, keep: bool = True) -> None:
        """Release a row. If `keep`, capture the part of its state first that the cache lacks."""
        self._pending.drop(seq.seq_id)
        if self.prefix_cache is not None and keep:
            self.room.shrink_cache()  # the row's memory becomes free for its copy
            capture = self.prefix_cache.plan_capture(seq, min(num_computed_tokens, seq.num_tokens))
            if capture is not None:
                self._pending.captures.append(capture)

    def _store(self, output: StepOutput) -> None:
        cache = self.prefix_cache
        if cache is None:
            return
        cache.release_matches()
        for snapshot in output.snapshots:
            cache.insert(snapshot, self._now)
        cache.trim_ended()
        for restore in output.failed_restores:
            cache.drop(restore.match, restore.seq)
            if restore.seq.seq_id in self._seqs:
                self._requeue(restore.seq, keep=False)  # it starts over at its first token, and no client notices

    # -- planning

    def _plan_decode(self, *, is_alone: bool) -> tuple[tuple[tuple[Sequence, ...], ...], Drafts, bool]:
        """Group all rows that decode, and count the tokens that each computes. Drain rows that have no tokens left.

        Returns with the groups the drafts of the rows, and whether the step must read its own samples.
        """
        rows = {}
        for seq in self._seqs.decoding():
            if seq.num_computed_tokens < seq.decode_end:
                rows[seq.seq_id] = seq
            else:
                self._seqs.drain(seq)
                self._leave(seq, seq.num_computed_tokens)
        drafts: Drafts = {}
        reads = False
        if self.speculation is not None and rows:
            rows_bytes = self.room.rows_bytes(extra=1 + MOST)
            is_ahead = any(seq.num_in_flight for seq in self._seqs)  # drained ones included
            room, merged = self.pool.num_bytes - rows_bytes, self._groups.merged
            drafts, reads = self.speculation.plan(
                list(rows.values()), self._now, room, is_ahead=is_ahead, merged=merged, is_alone=is_alone
            )
            if drafts:
                self.room.shrink_cache(rows_bytes + self.speculation.recorded_bytes)
        lengths = {row: seq.num_computed_tokens for row, seq in rows.items()}
        groups = self._groups.plan(lengths, lambda: self.pool.num_bytes - self.room.rows_bytes(extra=1), drafts)
        if self._groups.has_merged:
            self.room.shrink_cache()  # padding takes memory
        for seq in rows.values():
            seq.num_computed_tokens += 1 + len(drafts.get(seq.seq_id, ()))
        return tuple(tuple(rows[row] for row in group) for group in groups), drafts, reads

    # -- results

    def _take_tokens(self, outputs: Iterable[TokenOutput], drafted: Collection[int]) -> list[SequenceUpdate]:
        """`drafted` are the rows whose drafts were verified."""
        taken: dict[Sequence, list[TokenOutput]] = {}
        for output in outputs:
            seq = self._seqs.find(output.seq_id)
            if seq is None:
                continue  # it ended while this sample was in flight
            taken.setdefault(seq, []).extend([output] if seq.max_tokens else ())
            end = seq.take(output.token_id)
            if seq.seq_id in drafted:
                seq.num_computed_tokens = seq.num_tokens - 1  # the runner has kept the state of as many
            if self.speculation is not None:
                self.speculation.take(seq, output.token_id)
            if end is not None:
                self._finish(seq, end)
        return [update_of(seq, tuple(tokens)) for seq, tokens in taken.items()]

    def _report_admitted(self) -> list[SequenceUpdate]:
        """Report rows once their state is restored and before a long chunk runs. Tokens of chunks do not count yet."""
        admitted, self._pending.admitted = self._pending.admitted, []
        running = [seq for seq in admitted if seq.seq_id in self._seqs]
        return [replace(update_of(seq), num_computed_tokens=seq.num_cached_tokens) for seq in running]

    def _fail(self, seq_id: int, error: VLLMMLXError) -> SequenceUpdate | None:
        if (seq := self._seqs.find(seq_id)) is None:
            return None
        self._finish(seq, FinishReason.ABORT, keep=False)
        return SequenceUpdate(seq_id=seq_id, error=error)

    def _finish(self, seq: Sequence, reason: FinishReason, *, keep: bool = True) -> None:
        """End a sequence. `keep` says whether its state stays in the prefix cache for a later turn."""
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if self._pending.ended is not None:
            self._pending.ended.append(seq)
        self.pool.relieve()
        self.turns.leave(seq)
        if seq.is_ahead:
            self._stop_ahead(seq, keep=keep)
        self._groups.forget(seq.seq_id)
        if self.speculation is not None:
            self.speculation.close(seq.seq_id)
        if self._seqs.remove(seq):
            self._leave(seq, seq.num_computed_tokens, keep=keep)
        if self.prefix_cache is not None:
            self.prefix_cache.close(seq)

    def _stop_ahead(self, seq: Sequence, *, keep: bool) -> None:
        """Forget a beginning that cannot be computed. Once it is complete, the path that it replaces goes first."""
        beginning = self.ahead.stop(seq)
        if beginning is not None and not keep:
            self.ahead.forget(beginning)
        elif beginning is not None and beginning.position == seq.prefill_end and self.prefix_cache is not None:
            self.prefix_cache.retire(seq, beginning.replaced_key)


def update_of(seq: Sequence, tokens: tuple[TokenOutput, ...] = ()) -> SequenceUpdate:
    """Return the sequence's present state as an update."""
    return SequenceUpdate(
        seq_id=seq.seq_id,
        tokens=tokens,
        prompt_logprobs=seq.prompt_logprobs if seq.is_scored else (),
        num_computed_tokens=seq.num_computed_tokens,
        receipt=seq.receipt,
        num_predicted=seq.num_predicted,
        num_mispredicted=seq.num_mispredicted,
        scheduled_s=seq.scheduled_s,
        finish_reason=seq.finish_reason,
        stop_token_id=seq.stop_token_id,
    )
