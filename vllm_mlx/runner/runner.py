"""Carries out step plans on the device. It owns every row's state and decides nothing.

Decode runs one step ahead of reading: the forward pass of a step is launched on the unread samples of the previous
step, which are read while the device works. So the device works while Python does its part of a step. If a token must
be read before the next is sampled, the forward pass starts alone, and sampling waits for the masks. If a token
activates a mask after the next token was sampled, that token is sampled again.

A device fault concerns all rows: `decode` or `prefill` raises it, and no result of the call is reported or stored.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from typing import TypeVar, TypeVarTuple

import mlx.core as mx

from ..cache import layers, leaving, snapshot
from ..cache.layers import LayerCaches
from ..cache.media import MediaCache
from ..core.errors import GenerationError, RequestError, VLLMMLXError
from ..core.sequence import Sequence
from ..core.step import (
    Capture,
    ChunkTiming,
    PrefillChunk,
    Restore,
    Scored,
    Snapshot,
    StepOutput,
    StepPlan,
    TokenOutput,
    Verified,
    forward_passes,
)
from ..util.faults import Fault, RanksParted, device_fault
from ..util.fence import RowFence
from .batch import Batch, InFlight, regroup
from .device import DeviceWatch
from .masks import Masks
from .model import Model
from .sampler import score
from .verify import verify
from .vision_inputs import Features

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def wait_for_device() -> None:
    """Wait, and ignore the error of work whose results are dropped, on all lanes."""
    with suppress(RuntimeError):
        mx.synchronize()


class RowFences:
    """Fences the device work of rows. A failure ends a single row, and makes all rows suspects if there are several."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, VLLMMLXError]] = []
        self.suspects: dict[int, None] = {}  # an ordered set of seq_ids
        self.refused: list[tuple[int, int]] = []  # (seq_id, tokens) of chunks for which the device had no memory

    def run(self, seqs: Rows[Sequence], work: Callable[[*Ts], T], *args: *Ts) -> T | None:
        with RowFence("rows outside the batch whose device work failed") as fence:
            try:
                return work(*args)
            except RequestError as error:  # not a failure of the server: an image changed at its address
                self.failed += [(seq.seq_id, error) for seq in seqs]
                return None
        if len(seqs) == 1:
            cause = f"{type(fence.error).__name__}: {fence.error}"
            self.failed.append((seqs[0].seq_id, GenerationError(f"The model could not run this request: {cause}")))
        else:
            self.suspect(seqs)
        return None

    def run_chunk(self, seqs: Rows[Sequence], num_tokens: int, work: Callable[[*Ts], T], *args: *Ts) -> T | None:
        """Run a chunk of so many tokens. Returns None also if the device has no memory for it.

        Nothing else is in flight, so a lack of memory concerns this chunk alone.
        """
        try:
            return self.run(seqs, work, *args)
        except RuntimeError as error:
            if device_fault(error) is not Fault.OUT_OF_MEMORY:
                raise
            logger.warning("The device had no memory for a chunk of %d tokens: %s", num_tokens, error)
        self.refused += [(seq.seq_id, num_tokens) for seq in seqs]
        wait_for_device()
        return None

    def suspect(self, seqs: Iterable[Sequence]) -> None:
        failed = {seq_id for seq_id, _ in self.failed}
        self.suspects.update((seq.seq_id, None) for seq in seqs if seq.seq_id not in failed)


class Unfenced(RowFences):
    """Turns each failure into RanksParted, because the other ranks of the model have not met it, and continue."""

    def run(self, seqs: Rows[Sequence], work: Callable[[*Ts], T], *args: *Ts) -> T | None:
        try:
            return work(*args)
        except BaseException as error:
            if not isinstance(error, Exception) or device_fault(error) is Fault.PARTED:
                raise
            raise RanksParted(f"This rank failed: {type(error).__name__}: {error}") from error


class Runner:
    fences: type[RowFences] = RowFences

    def __init__(
        self,
        model: Model,
        watch: DeviceWatch,
        prefill_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        has_drafts: bool = False,
    ):
        """`prefill_context` is entered while the graph of a chunk is built. `has_drafts`: plans may have drafts."""
        self._prefill_context = prefill_context
        self.model = model
        self._watch = watch
        self._prefilled: dict[int, LayerCaches] = {}  # by seq_id: rows that do not decode yet
        self.batches: list[Batch] = []
        self._in_flight: list[InFlight] = []
        self._masks = Masks()
        self._has_drafts = has_drafts
        self._probe = mx.array(0)
        self._unstarted: set[int] = set()  # rows of this plan whose restore failed
        self._scored: list[Scored] = []  # of the running prefill

    @property
    def num_rows(self) -> int:
        return len(self._prefilled) + sum(len(batch.seqs) for batch in self.batches)

    @property
    def media(self) -> MediaCache[Features] | None:
        """Return the cache of image features. None for a model that takes no images."""
        return self.model.media

    def live_bytes(self) -> int:
        """Return bytes of all rows' state, including padding."""
        prefilled = sum(layers.state_bytes(caches) for caches in self._prefilled.values())
        return prefilled + sum(batch.nbytes for batch in self.batches)

    def decode(self, plan: StepPlan) -> StepOutput:
        """Let leaving rows go, restore rows, and launch one forward pass for all groups but the isolated ones.

        Returns the samples of the previous launch, and the new ones too if the plan has drafts or asks for it, or if
        prefill follows, which would delay them.
        """
        fences = self.fences()
        snapshots, failed_restores = self._begin(plan)
        self._unstarted = {restore.seq.seq_id for restore in failed_restores}
        self._arrange(forward_passes(_without(plan.decode, self._unstarted), plan.isolated), fences)
        arranged = time.perf_counter()
        if plan.drafts:
            tokens, verified = self._verify(plan, fences)
            has_read = True
        else:
            tokens, verified = self._step(fences), []
            has_read = bool(self._in_flight) and (plan.reads or bool(plan.prefill))
            if has_read:
                unread, self._in_flight = self._in_flight, []
                tokens += self._read(unread, fences)
        decode_s = time.perf_counter() - arranged if has_read else None
        self._check_device()
        self._watch.return_buffers()
        return StepOutput(
            tokens=tuple(tokens),
            verified=tuple(verified),
            forced=self._masks.forced(chain(*(batch.seqs for batch in self.batches))) if self._has_drafts else (),
            failed=(*fences.failed, *self._masks.take_failed()),
            suspects=tuple(fences.suspects),
            snapshots=tuple(snapshots),
            failed_restores=tuple(failed_restores),
            decode_s=decode_s,
            overrun=self._watch.overrun(),
        )

    def prefill(self, chunks: Iterable[PrefillChunk]) -> StepOutput:
        """Run the chunks one after the other, without padding, which would give recurrent layers wrong states."""
        fences, self._scored = self.fences(), []
        prefilled, timings, snapshots = [], [], []
        for chunk in chunks:
            if chunk.seq.seq_id in self._unstarted:
                continue
            began_s = time.perf_counter()
            seconds = self._run_chunk(chunk, fences)
            if seconds is None:
                self._prefilled.pop(chunk.seq.seq_id, None)
                continue
            score_s = time.perf_counter() - began_s - seconds if chunk.scores else 0.0
            timings.append(ChunkTiming(chunk.start, chunk.end - chunk.start, seconds, score_s))
            prefilled.append((chunk.seq.seq_id, chunk.end))
            if chunk.capture is not None and (taken := self._capture(chunk.capture)) is not None:
                snapshots.append(taken)
        mx.clear_cache()
        return StepOutput(
            prefilled=tuple(prefilled),
            scored=tuple(self._scored),
            failed=tuple(fences.failed),
            refused=tuple(fences.refused),
            snapshots=tuple(snapshots),
            chunk_timings=tuple(timings),
            overrun=self._watch.overrun(),
        )

    def rest(self) -> None:
        """Give back the freed buffers that MLX keeps for the next step."""
        mx.clear_cache()

    def reset(self) -> None:
        """Drop all rows, after a step that failed outside of any row's work."""
        self._prefilled.clear()
        self.batches.clear()
        self._in_flight.clear()
        self._masks.clear()
        mx.clear_cache()

    def _step(self, fences: RowFences) -> list[TokenOutput]:
        """Launch one forward pass of each batch, and read the samples of the previous launch."""
        unread, self._in_flight = self._in_flight, []
        free, started = [], []
        for batch in list(self.batches):  # in the plan's order, which does not depend on the samples
            if not self._masks.bind(batch.seqs):
                self._launch(batch, self._launch_one, fences)
                free.append(batch)
            elif self._run(batch, fences, Batch.start) is not None:
                started.append(batch)
        tokens = self._read(unread, fences)
        for batch in free:
            if batch in self.batches and self._masks.bind(batch.seqs):  # by a token that was read meanwhile
                self._in_flight = [drawn for drawn in self._in_flight if drawn.seqs is not batch.seqs]
                self._launch(batch, self._draw_again, fences)
        for batch in started:
            if batch in self.batches:
                self._launch(batch, self._draw, fences)
        return tokens

    def _verify(self, plan: StepPlan, fences: RowFences) -> tuple[list[TokenOutput], list[Verified]]:
        """Verify the drafts of all batches, one batch after the other. Nothing is in flight before and after."""
        tokens, verified = [], []
        for batch in list(self.batches):
            if (found := self._run(batch, fences, verify, plan.drafts, self._masks)) is not None:
                tokens += found[0]
                verified += found[1]
        return tokens, verified

    def _launch(self, batch: Batch, launch: Callable[[Batch], InFlight], fences: RowFences) -> None:
        if (launched := self._run(batch, fences, launch)) is not None:
            self._in_flight.append(launched)

    def _run(self, batch: Batch, fences: RowFences, work: Callable[[Batch, *Ts], T], *args: *Ts) -> T | None:
        """Run a batch's work. If it fails, drop the batch and return None."""
        done = fences.run(batch.seqs, work, batch, *args)
        if done is None:
            self._lose(batch.seqs, fences)
        return done

    def _launch_one(self, batch: Batch) -> InFlight:
        return batch.launch(keeps_logits=self._masks.has_any(batch.seqs))

    def _draw_again(self, batch: Batch) -> InFlight:
        """Sample again a token that was sampled before its mask was known."""
        words = self._masks.words(batch.seqs)
        assert words is not None, "a row is bound"
        return batch.redraw(words)

    def _draw(self, batch: Batch) -> InFlight:
        return batch.draw(self._masks.words(batch.seqs))

    def _read(self, in_flight: Iterable[InFlight], fences: RowFences) -> list[TokenOutput]:
        tokens: list[TokenOutput] = []
        for launched in in_flight:
            read = fences.run(launched.seqs, launched.read)
            if read is None:
                self._lose(launched.seqs, fences)
            else:
                tokens += read
        self._masks.feed(tokens)
        return tokens

    def _lose(self, seqs: Iterable[Sequence], fences: RowFences) -> None:
        """Drop the state of rows whose work failed, and of rows that have shared a batch with them since."""
        lost = {seq.seq_id for seq in seqs}
        tainted = [batch for batch in self.batches if not lost.isdisjoint(batch.seq_ids)]
        for batch in tainted:
            self.batches.remove(batch)
            fences.suspect(batch.seqs)
        self._in_flight = [
            launched for launched in self._in_flight if lost.isdisjoint(seq.seq_id for seq in launched.seqs)
        ]

    def _check_device(self) -> None:
        """Raise the error of a failed command buffer before its tokens are sent: reading them does not raise it.

        MLX raises it when it begins to encode other work, here a tiny operation, without waiting for that work.
        """
        mx.async_eval(self._probe + 1)  # type: ignore[no-untyped-call]
        if not self._in_flight:
            mx.synchronize()

    def drain(self) -> None:
        """Wait for the device. The results of its work are dropped."""
        wait_for_device()

    def _run_chunk(self, chunk: PrefillChunk, fences: RowFences) -> float | None:
        """Run a chunk. Returns its seconds, or None if the row has failed or the device had no memory for the chunk."""
        return fences.run_chunk([chunk.seq], chunk.end - chunk.start, self._prefill_chunk, chunk)

    def _prefill_chunk(self, chunk: PrefillChunk) -> float:
        """Run a chunk. Returns its seconds, without the time to encode its images and to score it."""
        self.model.encode(chunk.seq, chunk.start, chunk.end)
        start = time.perf_counter()
        caches = self._prefilled.get(chunk.seq.seq_id)
        allocation: AbstractContextManager[None] = nullcontext()
        if caches is None:
            caches = self._prefilled[chunk.seq.seq_id] = self._empty(chunk.start)
            allocation = layers.reserving(caches, chunk.seq.num_tokens)
        with self._prefill_context(), allocation:
            logits = self.model.prefill(chunk.seq, chunk.start, chunk.end, caches)
        layers.leave_window(caches)
        layers.complete(layers.state_arrays(caches))
        seconds = time.perf_counter() - start
        if chunk.scores:
            self._scored.append(Scored(chunk.seq.seq_id, chunk.start, score(chunk.seq, chunk.start, logits[0])))
        return seconds

    def _begin(self, plan: StepPlan) -> tuple[list[Snapshot], list[Restore]]:
        """Let rows go and restore rows. Returns the copies that were made, and the restores that failed."""
        return self._let_go(plan), [restore for restore in plan.restores if not self._restore(restore)]

    def _unstart(self, restores: Iterable[Restore], seq_ids: Collection[int]) -> list[Restore]:
        """Drop rows that were restored. Returns the restores of these rows."""
        for seq_id in seq_ids:
            self._prefilled.pop(seq_id, None)
        return [restore for restore in restores if restore.seq.seq_id in seq_ids]

    def _let_go(self, plan: StepPlan) -> list[Snapshot]:
        """Let the leaving rows go, one after the other. The state that the cache lacks replaces a row's buffers.

        A row that shares buffers with others, or returns in this step, stays in its batch until batches are arranged.
        """
        returning = {seq.seq_id for group in plan.decode for seq in group}
        captures = {capture.seq.seq_id: capture for capture in plan.captures}
        snapshots = []
        for seq_id in sorted(plan.release, key=captures.__contains__):  # rows that are not copied free memory first
            self._masks.drop(seq_id)
            row, capture = self._take_out(seq_id, returning), captures.get(seq_id)
            if capture is not None and (taken := self._capture(capture, row)) is not None:
                snapshots.append(taken)
        return snapshots

    def _take_out(self, seq_id: int, returning: Collection[int]) -> leaving.OwnRow | None:
        """Take out a row that leaves, if no other row lies in its buffers. Returns None if one does."""
        if (caches := self._prefilled.pop(seq_id, None)) is not None:
            return (*layers.split(caches), 0)
        batch = next((batch for batch in self.batches if seq_id in batch.seq_ids), None)
        if batch is None or seq_id in returning:
            return None
        if len(batch.seqs) == 1:
            self.batches.remove(batch)
        return batch.take_out(seq_id)

    def _capture(self, capture: Capture, row: leaving.OwnRow | None = None) -> Snapshot | None:
        """Copy the state of a row, or of `row` if it was taken out. Returns None if that fails: nothing is stored."""
        span, window = (capture.row_length, capture.start, capture.end), self.model.window
        with _cache_fence():
            if row is not None:
                return Snapshot(capture, *leaving.hand_over(*row, *span, window))
            if (view := self._view(capture.seq.seq_id, capture.row_length)) is not None:
                return Snapshot(capture, *snapshot.capture(view, *span[1:], window))
        return None

    def _restore(self, restore: Restore) -> bool:
        seq, match = restore.seq, restore.match
        caches = self.model.new_caches()
        with _cache_fence() as fence:
            snapshot.restore(caches, match.pieces, match.state, length=match.length, capacity=seq.num_tokens)
            self._prefilled[seq.seq_id] = caches
        return fence.error is None

    def _view(self, seq_id: int, length: int) -> snapshot.RowView | None:
        """View a row's state. Returns None if there is no such row."""
        if seq_id in self._prefilled:
            kv, states = layers.split(self._prefilled[seq_id])
            return snapshot.view(kv, 0, states, 0, length)
        batch = next((batch for batch in self.batches if seq_id in batch.seq_ids), None)
        return None if batch is None else batch.view(seq_id, length)

    def _arrange(self, passes: Rows[Rows[Rows[Sequence]]], fences: RowFences) -> None:
        """Make the batches hold exactly these forward passes, which consist of groups."""
        wanted = [[{seq.seq_id for seq in group} for group in groups] for groups in passes]
        if [[set(group.seq_ids) for group in batch.groups] for batch in self.batches] == wanted:
            return
        held = [*self.batches, *self._start_rows(passes, fences)]
        places = {seq_id: (batch, index) for batch in held for index, seq_id in enumerate(batch.seq_ids)}
        wanted = [[ids & places.keys() for ids in groups] for groups in wanted]
        wanted = [left for groups in wanted if (left := [ids for ids in groups if ids])]
        for batch in held:
            batch.let_go()
        groups = iter(regroup([group for batch in held for group in batch.groups], list(chain(*wanted))))
        self.batches = [Batch.of([next(groups) for _ in ids], held, places) for ids in wanted]

    def _start_rows(self, passes: Rows[Rows[Rows[Sequence]]], fences: RowFences) -> list[Batch]:
        """Start the rows that do not decode yet. A row that fails is left out."""
        begun = {seq_id for batch in self.batches for seq_id in batch.seq_ids}
        coming = [seq for groups in passes for group in groups for seq in group if seq.seq_id not in begun]
        started = (fences.run([seq], self._start, seq) for seq in coming)
        return [batch for batch in started if batch is not None]

    def _start(self, seq: Sequence) -> Batch:
        """Make a batch of one row that begins to decode: it feeds the last known token."""
        caches = self._prefilled.pop(seq.seq_id, None) or self._empty(seq.prefill_end)
        self._masks.start(seq)
        return Batch.of_row(self.model, seq, caches, seq.prefill_end)

    def _empty(self, num_computed_tokens: int) -> LayerCaches:
        """Return the caches of a row that begins. A row whose state is lost fails, because its reply would be wrong."""
        if num_computed_tokens:
            raise RuntimeError(f"the state of {num_computed_tokens} computed tokens is lost")
        return self.model.new_caches()


def _cache_fence() -> RowFence:
    return RowFence("the row, which goes on without this part of the prefix cache")


def _without(groups: Rows[Rows[Sequence]], seq_ids: set[int]) -> Rows[Rows[Sequence]]:
    if not seq_ids:
        return groups
    kept = [[seq for seq in group if seq.seq_id not in seq_ids] for group in groups]
    return [group for group in kept if group]
