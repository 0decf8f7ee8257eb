"""The real prefix planner and trees on requests at given times: seconds of prefill, under any rule of what to keep.

Requests run one at a time: the clairvoyant rule must know the times of all requests, so that no rule may move them.
That leaves nothing for the scheduler to decide. Rows take memory of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from vllm_mlx.cache.index import WORD_BYTES
from vllm_mlx.cache.node import ResumeRule, Space
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.cache.victims import Worth
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.sequence import Sequence as Row
from vllm_mlx.core.step import Snapshot
from vllm_mlx.scheduler.prefix_planner import PrefixPlanner

from .device_model import Device, Shape
from .device_runner import State, footprint
from .keep_policies import Clairvoyant
from .recorded_sessions import Request

CHUNK = 2048
NO_LIMIT = 1 << 60
SPACE: Space = ("simulated", "")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """KV of some tokens of the path of the request `source`."""

    source: int
    start: int
    end: int
    window_start: int
    shape: Shape
    num_buffers: int = 1

    @property
    def nbytes(self) -> int:
        windowed = (self.end - self.window_start) * self.shape.num_windowed * self.shape.layer_token_bytes
        return (self.end - self.start) * self.shape.token_bytes + windowed

    def split(self, at: int) -> "tuple[Segment, Segment]":
        middle = self.start + at
        return (
            Segment(self.source, self.start, middle, min(self.window_start, middle), self.shape),
            Segment(self.source, middle, self.end, max(self.window_start, middle), self.shape),
        )


@cache
def prefill_s(device: Device, start: int, end: int) -> float:
    return sum(device.chunk_s(min(CHUNK, end - at), at) for at in range(start, end, CHUNK))


@cache
def s_per_token(device: Device) -> float:
    return (device.chunk_s(256) - device.chunk_s(64)) / 192


def rule_of(shape: Shape) -> ResumeRule:
    return ResumeRule(needs_state=shape.num_recurrent > 0, window=shape.window or None)


class Simulation:
    def __init__(self, device: Device, requests: Sequence[Request], *, memory_bytes: int = NO_LIMIT, rule: Worth):
        self.computed_s = 0.0
        self.peak_bytes = 0  # most that the cache held
        self._device = device
        self._requests = requests
        self._clairvoyant = rule if isinstance(rule, Clairvoyant) else None
        self._memory_bytes = memory_bytes
        self._rule = rule_of(device.shape)
        self._memory = MemoryAwarePrefixCache(max_bytes=memory_bytes, worth=rule)
        self._memory.add_model(SPACE[0], self._rule, s_per_token=s_per_token(device))
        if self._clairvoyant is not None:
            self._clairvoyant.bind(self._memory)
        self._planner = PrefixPlanner(
            self._memory, SPACE[0], self._rule, footprint(device.shape), max_bytes=memory_bytes, snapshot_every=0
        )

    def run(self) -> "Simulation":
        for number, request in enumerate(self._requests):
            if self._clairvoyant is not None:
                self._clairvoyant.begin(number)
                self._memory.set_limit(NO_LIMIT)
            self._serve(number, request)
            self._memory.set_limit(self._memory_bytes)
            self.peak_bytes = max(self.peak_bytes, self._memory.used_bytes)
        return self

    def _serve(self, number: int, request: Request) -> None:
        prompt = PromptInputs(token_ids=tuple(request.token_ids(0, request.num_prompt)), snapshot_points=request.points)
        row = Row(seq_id=number, prompt=prompt, sampling=TokenSampling(), max_tokens=1)
        planner, now = self._planner, request.at_s
        planner.open(row)
        planner.resume(row, now)
        planner.release_matches()
        while row.num_computed_tokens < row.prefill_end:
            start, end = row.num_computed_tokens, planner.next_point(row)
            self.computed_s += prefill_s(self._device, start, end)
            row.num_computed_tokens = end
            self._capture(row, end, now)
        row.output_token_ids += request.token_ids(request.num_prompt, request.num_tokens)
        row.num_computed_tokens = row.num_tokens
        self._capture(row, row.num_tokens, now)
        planner.close(row)

    def _capture(self, row: Row, end: int, now: float) -> None:
        capture = self._planner.plan_capture(row, end)
        if capture is None:
            return
        shape = self._device.shape
        window_start = max(capture.start, capture.end - shape.window) if shape.num_windowed else capture.start
        segment = Segment(capture.seq.seq_id, capture.start, capture.end, window_start, shape)
        if self._clairvoyant is not None and self._rule == ResumeRule():
            for point in self._clairvoyant.forks(row.seq_id, capture.start, capture.end):
                before, segment = segment.split(point - segment.start)
                part = capture.key[: point * WORD_BYTES]
                self._memory.insert(
                    SPACE, part, start=before.start, segment=before, window_start=before.start, state=None, now=now
                )
            capture = replace(capture, start=segment.start)
            window_start = segment.start
        self._planner.insert(Snapshot(capture, segment, window_start, self._state()), now)

    def _state(self) -> State | None:
        size = self._device.shape.num_recurrent * self._device.shape.state_bytes
        return State(size) if size else None
