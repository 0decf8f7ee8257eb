"""Carries out step plans on the device. Owns every row's state; decides nothing.

Decode runs one step ahead of reading: the forward pass of this step is launched on the unread samples of the last,
which are read while the device works. Python's part of a step is thereby hidden behind the device's.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ..cache import layers, snapshot
from ..cache.layers import LayerCaches
from ..cache.media import MediaCache
from ..core.errors import GenerationError
from ..core.sequence import Sequence
from ..core.step import Capture, ChunkTiming, PrefillChunk, Restore, Snapshot, StepOutput, StepPlan, TokenOutput
from .batch import Batch, InFlight
from .device import DeviceWatch
from .masks import Masks
from .model import Model
from .vision_inputs import Features

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CLEAR_INTERVAL = 32  # decode steps between returns of freed buffers to the system


class Runner:
    def __init__(self, model: Model, watch: DeviceWatch):
        self._model = model
        self._watch = watch
        self._prefilled: dict[int, LayerCaches] = {}  # rows that do not decode yet
        self._batches: list[Batch] = []
        self._in_flight: list[InFlight] = []
        self._masks = Masks()
        self._unstarted: set[int] = set()  # rows of this step's plan whose restore failed
        self._num_steps = 0

    @property
    def num_rows(self) -> int:
        return len(self._prefilled) + sum(len(batch.seqs) for batch in self._batches)

    @property
    def media(self) -> MediaCache[Features] | None:
        """What is kept of encoded images; None for a model that takes none."""
        return self._model.media

    def live_bytes(self) -> int:
        """Bytes of all rows' state, padding included."""
        prefilled = sum(layers.state_bytes(caches) for caches in self._prefilled.values())
        return prefilled + sum(batch.nbytes for batch in self._batches)

    def decode(self, plan: StepPlan) -> StepOutput:
        """Capture and drop what leaves, start what is restored, launch one forward pass a group, and return the
        samples of the last launch.

        With prefill in the plan, the new samples are waited for as well: they would be late after it.
        """
        start = time.perf_counter()
        fence = _Fence()
        snapshots = [taken for capture in plan.captures if (taken := self._capture(capture)) is not None]
        for seq_id in plan.release:
            self._prefilled.pop(seq_id, None)
            self._masks.drop(seq_id)
        failed_restores = [restore for restore in plan.restores if not self._restore(restore)]
        self._unstarted = {restore.seq.seq_id for restore in failed_restores}
        self._arrange(_without(plan.decode, self._unstarted), fence)
        unread, self._in_flight = self._in_flight, []
        held = [batch for batch in self._batches if self._masks.has_any(batch.seqs)]
        self._launch((batch for batch in list(self._batches) if batch not in held), Batch.launch, fence)
        started = [batch for batch in held if self._run(batch, _start, fence)]
        tokens = self._read(unread, fence)
        self._launch([batch for batch in started if batch in self._batches], self._draw, fence)
        decode_s = None
        if plan.prefill and self._in_flight:
            unread, self._in_flight = self._in_flight, []
            tokens += self._read(unread, fence)
            decode_s = time.perf_counter() - start
        self._num_steps += 1
        if self._num_steps % _CLEAR_INTERVAL == 0:
            mx.clear_cache()
        return StepOutput(
            tokens=tuple(tokens),
            failed=(*fence.failed, *self._masks.take_failed()),
            suspects=tuple(fence.suspects),
            snapshots=tuple(snapshots),
            failed_restores=tuple(failed_restores),
            decode_s=decode_s,
            overrun=self._watch.overrun(),
        )

    def prefill(self, chunks: Iterable[PrefillChunk]) -> StepOutput:
        """Run the chunks one after the other, each row unpadded: padding breaks recurrent layers."""
        fence = _Fence()
        prefilled, timings, snapshots = [], [], []
        for chunk in chunks:
            if chunk.seq.seq_id in self._unstarted:
                continue
            seconds = fence.run([chunk.seq], partial(self._prefill_chunk, chunk))
            if seconds is None:
                self._prefilled.pop(chunk.seq.seq_id, None)
                continue
            timings.append(ChunkTiming(chunk.start, chunk.end - chunk.start, seconds))
            prefilled.append((chunk.seq.seq_id, chunk.end))
            if chunk.capture is not None and (taken := self._capture(chunk.capture)) is not None:
                snapshots.append(taken)
        mx.clear_cache()
        return StepOutput(
            prefilled=tuple(prefilled),
            failed=tuple(fence.failed),
            snapshots=tuple(snapshots),
            chunk_timings=tuple(timings),
            overrun=self._watch.overrun(),
        )

    def reset(self) -> None:
        """Forget all rows, after a step that failed as a whole."""
        self._prefilled.clear()
        self._batches.clear()
        self._in_flight.clear()
        self._masks.clear()
        mx.clear_cache()

    def _launch(self, batches: Iterable[Batch], launch: Callable[[Batch], InFlight], fence: "_Fence") -> None:
        for batch in batches:
            launched = self._run(batch, launch, fence)
            if launched is not None:
                self._in_flight.append(launched)

    def _run(self, batch: Batch, work: Callable[[Batch], T], fence: "_Fence") -> T | None:
        """None, and the batch is gone, where its work failed."""
        done = fence.run(batch.seqs, partial(work, batch))
        if done is None:
            self._lose(batch.seqs, fence)
        return done

    def _draw(self, batch: Batch) -> InFlight:
        return batch.draw(self._masks.words(batch.seqs))

    def _read(self, in_flight: Iterable[InFlight], fence: "_Fence") -> list[TokenOutput]:
        tokens: list[TokenOutput] = []
        for launched in in_flight:
            read = fence.run(launched.seqs, launched.read)
            if read is None:
                self._lose(launched.seqs, fence)
            else:
                tokens += read
        self._masks.feed(tokens)
        return tokens

    def _lose(self, seqs: Iterable[Sequence], fence: "_Fence") -> None:
        """Drop the state that failed work leaves, and that of rows which have shared a batch with it since."""
        lost = {seq.seq_id for seq in seqs}
        tainted = [batch for batch in self._batches if not lost.isdisjoint(batch.seq_ids)]
        for batch in tainted:
            self._batches.remove(batch)
            fence.suspect(batch.seqs)
        self._in_flight = [
            launched for launched in self._in_flight if lost.isdisjoint(seq.seq_id for seq in launched.seqs)
        ]

    def _prefill_chunk(self, chunk: PrefillChunk) -> float:
        """Seconds that the chunk took, without the images that were encoded for it."""
        self._model.encode(chunk.seq, chunk.start, chunk.end)
        start = time.perf_counter()
        caches = self._prefilled.get(chunk.seq.seq_id)
        if caches is None:
            caches = self._prefilled[chunk.seq.seq_id] = self._model.new_caches()
        self._model.prefill(chunk.seq, chunk.start, chunk.end, caches)
        layers.leave_window(caches)
        mx.eval(layers.state_arrays(caches))
        return time.perf_counter() - start

    def _capture(self, capture: Capture) -> Snapshot | None:
        """None where it cannot be done: the row goes on, the cache goes without."""
        caches, row = self._find(capture.seq.seq_id)
        if caches is None:
            return None
        try:
            seen = snapshot.view(caches, row, capture.row_length)
            taken = snapshot.capture(seen, capture.start, capture.end, self._model.window)
        except Exception:  # whatever it is, it concerns the copy alone
            logger.exception("A snapshot failed")
            return None
        return Snapshot(capture, *taken)

    def _restore(self, restore: Restore) -> bool:
        seq, match = restore.seq, restore.match
        caches = self._model.new_caches()
        try:
            snapshot.restore(caches, match.pieces, match.state, length=match.length, capacity=seq.num_tokens)
        except Exception:  # whatever it is, the row can begin from nothing
            logger.exception("A cached prefix could not be restored")
            return False
        finally:
            restore.release()
        self._prefilled[seq.seq_id] = caches
        return True

    def _find(self, seq_id: int) -> tuple[LayerCaches | None, int]:
        """A row's caches and its place in them."""
        if seq_id in self._prefilled:
            return self._prefilled[seq_id], 0
        for batch in self._batches:
            if seq_id in batch.seq_ids:
                return batch.caches, batch.seq_ids.index(seq_id)
        return None, 0

    def _arrange(self, groups: Rows[Rows[Sequence]], fence: "_Fence") -> None:
        """Make the batches hold exactly these groups, moving as few rows as possible."""
        wanted = [{seq.seq_id for seq in group} for group in groups]
        if [set(batch.seq_ids) for batch in self._batches] == wanted:
            return
        bases = self._claim_bases(wanted)
        staying = {id(base): ids for base, ids in zip(bases, wanted, strict=True) if base is not None}
        moving = set().union(*wanted)
        singles = {
            seq_id: batch.take(index)
            for batch in self._batches
            for index, seq_id in enumerate(batch.seq_ids)
            if seq_id in moving and seq_id not in staying.get(id(batch), ())
        }
        formed = (
            self._form(group, ids, base, singles, fence) for group, ids, base in zip(groups, wanted, bases, strict=True)
        )
        self._batches = [batch for batch in formed if batch is not None]

    def _claim_bases(self, wanted: list[set[int]]) -> list[Batch | None]:
        """For each group the batch that already holds most of it; no batch twice."""
        bases: list[Batch | None] = []
        free = list(self._batches)
        for ids in wanted:
            best = max(free, key=lambda batch: len(ids.intersection(batch.seq_ids)), default=None)
            if best is None or not ids.intersection(best.seq_ids):
                bases.append(None)
            else:
                bases.append(best)
                free.remove(best)
        return bases

    def _form(
        self,
        group: Rows[Sequence],
        seq_ids: set[int],
        base: Batch | None,
        singles: dict[int, Batch],
        fence: "_Fence",
    ) -> Batch | None:
        """None where the group has no row that could be started."""
        if base is not None:
            base.keep([index for index, seq_id in enumerate(base.seq_ids) if seq_id in seq_ids])
        present = set(base.seq_ids) if base is not None else set()
        arriving = [seq for seq in group if seq.seq_id not in present]
        found = (singles.get(seq.seq_id) or fence.run([seq], partial(self._start, seq)) for seq in arriving)
        joining = [batch for batch in found if batch is not None]
        if base is None and joining:
            base = joining.pop(0)
        if base is not None and joining:
            base.join(joining)
        return base

    def _start(self, seq: Sequence) -> Batch:
        """A row that begins to decode: its next token is the last one known."""
        caches = self._prefilled.pop(seq.seq_id, None) or self._model.new_caches()
        self._masks.start(seq)
        position = seq.num_computed_tokens - 1  # the plan counts the token that this step feeds
        return Batch(self._model, [seq], caches, mx.array(seq.tokens(position, position + 1)))


class _Fence:
    """Runs device work for some rows; what cannot run fails its one row, or makes suspects of several."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, GenerationError]] = []
        self.suspects: dict[int, None] = {}  # in order

    def run(self, seqs: Rows[Sequence], work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:
            logger.exception("Device work failed")
            if len(seqs) == 1:
                failure = GenerationError(f"The model could not run this request: {type(error).__name__}: {error}")
                self.failed.append((seqs[0].seq_id, failure))
            else:
                self.suspect(seqs)
            return None

    def suspect(self, seqs: Iterable[Sequence]) -> None:
        failed = {seq_id for seq_id, _ in self.failed}
        self.suspects.update((seq.seq_id, None) for seq in seqs if seq.seq_id not in failed)


def _without(groups: Rows[Rows[Sequence]], seq_ids: set[int]) -> Rows[Rows[Sequence]]:
    if not seq_ids:
        return groups
    kept = [[seq for seq in group if seq.seq_id not in seq_ids] for group in groups]
    return [group for group in kept if group]


def _start(batch: Batch) -> bool:
    batch.start()
    return True
