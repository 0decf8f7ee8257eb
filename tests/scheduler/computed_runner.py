"""A fake runner whose clock is the device model: what a schedule takes on a chip."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from vllm_mlx.core.step import StepOutput, StepPlan

from .fake_runner import FakeRunner

Clock = Callable[[float], float]  # computed seconds → measured ones


def device(chip: str, shape: str) -> Device:
    return Device(CHIPS[chip], SHAPES[shape])


def exact(seconds: float) -> float:
    return seconds


class ComputedRunner(FakeRunner):
    def __init__(self, machine: Device, clock: Clock = exact):
        super().__init__()
        self._device, self._clock = machine, clock
        self.now_s = 0.0
        self.token_times: dict[int, list[float]] = {}  # by seq_id: when a token was read

    def decode(self, plan: StepPlan) -> StepOutput:
        output = super().decode(plan)
        seconds = 0.0
        if plan.decode:
            groups = [[row.num_computed_tokens for row in group] for group in plan.decode]
            seconds = self._clock(self._device.decode_s([groups]))
        self.now_s += seconds
        for token in output.tokens:
            self.token_times.setdefault(token.seq_id, []).append(self.now_s)
        return replace(output, decode_s=seconds if plan.prefill and plan.decode else None)

    def prefill(self, chunks) -> StepOutput:
        output = super().prefill(chunks)
        timings = tuple(
            replace(timing, seconds=self._clock(self._device.chunk_s(timing.num_tokens, timing.start)))
            for timing in output.chunk_timings
        )
        self.now_s += sum(timing.seconds for timing in timings)
        return replace(output, chunk_timings=timings)

    def worst_gap_s(self, seq_id: int) -> float:
        times = self.token_times[seq_id]
        return max(later - earlier for earlier, later in pairwise(times))
