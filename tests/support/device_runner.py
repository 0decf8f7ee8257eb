"""The scheduler's device, simulated: it takes step plans, and its clock advances by what the device model computes.

A row is the number of its tokens. Copies are those of joins, leaves, captures and restores; a step of decoding runs
while its samples of the step before are read, as on a device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_mlx.core.memory import RowFootprint
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.core.step import Capture, ChunkTiming, PrefillChunk, Restore, Snapshot, StepOutput, StepPlan, TokenOutput

from .device_model import Device, Shape

EVAL_S = 0.2e-3  # one wait for the device with nothing under way
_Groups = list[tuple[Sequence, ...]]


def footprint(shape: Shape) -> RowFootprint:
    return RowFootprint(
        bytes_per_token=shape.token_bytes,
        fixed_bytes=shape.num_recurrent * shape.state_bytes,
        windows=((shape.window, shape.num_windowed * shape.layer_token_bytes),) if shape.num_windowed else (),
        num_layers=max(1, shape.num_attention - shape.num_windowed),
    )


@dataclass(frozen=True, eq=False)
class Segment:
    """Stored KV of so many tokens. Its bytes are those of a copy."""

    num_tokens: int
    start: int
    window_start: int
    bytes_per_token: int
    num_buffers: int = 1

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    def split(self, at: int) -> "tuple[Segment, Segment]":
        middle = self.start + at
        return (
            Segment(at, self.start, min(self.window_start, middle), self.bytes_per_token),
            Segment(self.num_tokens - at, middle, max(self.window_start, middle), self.bytes_per_token),
        )


@dataclass(frozen=True, eq=False)
class State:
    nbytes: int
    num_buffers: int = 1


@dataclass(frozen=True)
class Launch:
    seqs: tuple[Sequence, ...]
    samples: tuple[TokenOutput, ...]
    end_s: float


@dataclass
class Clock:
    now_s: float = 0.0
    free_s: float = 0.0  # when the device has done what it was given


class SimulatedRunner:
    media = None

    def __init__(self, device: Device, next_token: Callable[[Sequence, int], int], clock: Clock | None = None):
        """`next_token`: the token of a row at a position. `clock` is that of all models of the device."""
        self._clock = clock or Clock()
        self.copied_bytes = 0  # of joins, leaves and merges
        self.num_passes = self.num_steps = self.num_calls = 0
        self.longest_decode_s = 0.0  # with copies, of a step that also has prefill
        self._device = device
        self._state_bytes = device.shape.num_recurrent * device.shape.state_bytes  # of one row
        self._next_token = next_token
        self._groups: list[dict[int, int]] = []  # seq_id -> tokens
        self._launched: Launch | None = None

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._clock.now_s = now_s

    @property
    def num_rows(self) -> int:
        return len(_rows(self._groups))

    def live_bytes(self) -> int:
        return 0

    def rest(self) -> None:
        """Keep nothing that could be freed."""

    def reset(self) -> None:
        """Drop all rows."""
        self._groups, self._launched = [], None

    def decode(self, plan: StepPlan) -> StepOutput:
        start_s = self.now_s
        self.num_calls += 1
        snapshots = tuple(self._capture(capture) for capture in plan.captures)
        for restore in plan.restores:
            self._restore(restore)
        self._arrange(plan.decode)
        arranged_s = self.now_s
        last, self._launched = self._launched, None
        if plan.decode:
            self._launch(list(plan.decode), plan.isolated)
        tokens = self._read(last)
        decode_s = None
        if (plan.prefill or plan.reads) and self._launched is not None:
            tokens += self._read(self._launched)
            self._launched, decode_s = None, self.now_s - arranged_s
            self.longest_decode_s = max(self.longest_decode_s, self.now_s - start_s)
        return StepOutput(tokens=tokens, snapshots=snapshots, decode_s=decode_s)

    def prefill(self, chunks: Iterable[PrefillChunk]) -> StepOutput:
        timings, prefilled, snapshots = [], [], []
        for chunk in chunks:
            num_tokens = chunk.end - chunk.start
            seconds = self._device.chunk_s(num_tokens, chunk.start)
            self._wait(seconds)
            timings.append(ChunkTiming(chunk.start, num_tokens, seconds))
            prefilled.append((chunk.seq.seq_id, chunk.end))
            if chunk.capture is not None:
                snapshots.append(self._capture(chunk.capture))
        return StepOutput(prefilled=tuple(prefilled), chunk_timings=tuple(timings), snapshots=tuple(snapshots))

    def _wait(self, seconds: float) -> None:
        """Work that is waited for: it begins when the device is free."""
        self.now_s = self._clock.free_s = max(self.now_s, self._clock.free_s) + seconds

    def _launch(self, groups: _Groups, isolated: frozenset[int]) -> None:
        seqs = tuple(seq for group in groups for seq in group)
        lengths = [[seq.num_computed_tokens for seq in group] for group in groups]
        alone = [group[0].seq_id in isolated for group in groups]
        passes = [[group] for group, is_alone in zip(lengths, alone, strict=True) if is_alone]
        shared = [group for group, is_alone in zip(lengths, alone, strict=True) if not is_alone]
        passes += [shared] if shared else []
        self._clock.free_s = max(self.now_s, self._clock.free_s) + self._device.decode_s(passes)
        self.num_passes += len(passes)
        self.num_steps += 1
        samples = (TokenOutput(seq.seq_id, self._next_token(seq, seq.num_computed_tokens)) for seq in seqs)
        self._launched = Launch(seqs, tuple(samples), self._clock.free_s)

    def _read(self, launch: Launch | None) -> tuple[TokenOutput, ...]:
        if launch is None:
            return ()
        self.now_s = max(self.now_s, launch.end_s)
        return launch.samples

    def _capture(self, capture: Capture) -> Snapshot:
        shape = self._device.shape
        copied = footprint(shape).copy_bytes(capture.end - capture.start)
        self._wait(self._device.copy_s(copied))
        window_start = max(capture.start, capture.end - shape.window) if shape.num_windowed else capture.start
        segment = Segment(capture.end - capture.start, capture.start, window_start, shape.token_bytes)
        state = State(self._state_bytes) if self._state_bytes else None
        return Snapshot(capture, segment, window_start, state)

    def _restore(self, restore: Restore) -> None:
        self._wait(self._device.copy_s(self._device.shape.row_bytes(restore.match.length)))

    def _arrange(self, groups: _Groups) -> None:
        """Count the copies that lead from the groups of the last plan to these. A row that begins moves nothing."""
        wanted = [{seq.seq_id: seq.num_computed_tokens for seq in group} for group in groups]
        free = list(self._groups)
        copied = num_waits = 0
        for group in wanted:
            base = max(free, key=lambda held: len(held.keys() & group.keys()), default=None)
            if base is None or not base.keys() & group.keys():
                base = {}
            else:
                free.remove(base)
            kept = base.keys() & group.keys()
            if kept and kept != base.keys() and len(base) > 1:
                copied, num_waits = copied + self._bytes(group[seq_id] for seq_id in kept), num_waits + 2
            if len(group) > 1 and kept != group.keys():
                copied, num_waits = copied + self._bytes(group.values()), num_waits + 1
        if _rows(wanted) != _rows(self._groups):
            copied += len(_rows(wanted)) * self._state_bytes  # recurrent layers hold one batch of all rows' states
        self._groups = wanted
        if copied:
            self.copied_bytes += copied
            self._wait(self._device.copy_s(copied) + num_waits * EVAL_S)

    def _bytes(self, lengths: Iterable[int]) -> int:
        """Bytes of rows in one buffer, which is as long as the longest."""
        lengths = list(lengths)
        return len(lengths) * (self._device.shape.row_bytes(max(lengths)) - self._state_bytes)


def _rows(groups: Iterable[dict[int, int]]) -> set[int]:
    return {seq_id for group in groups for seq_id in group}
