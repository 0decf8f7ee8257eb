"""The real scheduler on a simulated device, under rows of fixed length and under agents. Time is virtual."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.memory import MemoryBudget
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence, SequenceStatus
from vllm_mlx.core.step import StepOutput
from vllm_mlx.runner.calibrate import overhead_of
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.prefix_planner import PrefixPlanner
from vllm_mlx.scheduler.scheduler import Scheduler

from .device_model import Device
from .device_runner import SimulatedRunner, footprint

BUDGET_SHARE = 0.7  # of the chip's memory
TRANSIENT_BYTES = 10**9
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent: tokens of its prompt, of its reply, and seconds until the next request."""

    prompt: int
    reply: int
    pause_s: float


@dataclass(slots=True)
class Heard:
    """When a client got the tokens of one reply."""

    sent_s: float
    times: list[float] = field(default_factory=list)

    @property
    def worst_gap_s(self) -> float:
        return _worst_gap_s(self.times)


def fits(device: Device, num_tokens: int) -> bool:
    """Whether the chip's largest build holds the model and rows of so many tokens together."""
    room = BUDGET_SHARE * device.chip.memory_bytes - device.shape.weights_bytes - TRANSIENT_BYTES
    return room > 1.1 * device.shape.token_bytes * num_tokens


def pacer_of(
    device: Device, clock: Callable[[float], float] = lambda seconds: seconds, *, max_stall_s: float | None = None
) -> PrefillPacer:
    """The pacer of a server that has measured the device at load, by a clock that may change computed seconds."""
    short_s, probe_s = min(clock(device.chunk_s(64)) for _ in range(2)), clock(device.chunk_s(256))
    overhead_s = overhead_of(short_s, probe_s)
    return PrefillPacer(
        max_stall_s=max_stall_s,
        max_chunk=2048,
        tokens_per_s=256 / (probe_s - overhead_s),
        overhead_s=overhead_s,
        half_share=clock(device.chunk_s(32)) / short_s,
        long_probe_s=clock(device.chunk_s(1024)) if device.shape.num_experts else None,
    )


class Serving:
    """A server without a model: requests come in, the scheduler plans, and the device's clock runs."""

    def __init__(self, device: Device, *, with_cache: bool):
        config = EngineConfig(model="simulated")
        memory = MemoryBudget(
            total_bytes=int(BUDGET_SHARE * device.chip.memory_bytes),
            weights_bytes=int(device.shape.weights_bytes),
            transient_bytes=TRANSIENT_BYTES,
        )
        row, shape = footprint(device.shape), device.shape
        self.pacer = pacer_of(device)
        cache = None
        if with_cache:
            rule = ResumeRule(needs_state=shape.num_recurrent > 0, window=shape.window or None)
            tree = MemoryAwarePrefixCache(max_bytes=memory.rows_bytes)
            cache = PrefixPlanner(
                tree, "simulated", rule, row, max_bytes=memory.rows_bytes, snapshot_every=config.snapshot_every
            )
        self.scheduler = Scheduler(config, memory=memory, footprint=row, pacer=self.pacer, prefix_cache=cache)
        self.runner = SimulatedRunner(device, lambda seq, position: _token(seq.seq_id >> 16, position))
        self.heard: dict[int, Heard] = {}
        self.num_tokens = 0

    def send(
        self, agent: int, number: int, num_tokens: int, max_tokens: int, token_ids: list[int] | None = None
    ) -> Sequence:
        """An agent's prompt begins with its earlier prompts and replies, unless it has other `token_ids`."""
        seq = Sequence(
            seq_id=(agent << 16) + number,
            prompt=PromptInputs(token_ids=tuple(token_ids or self.text(agent, 0, num_tokens))),
            sampling=TokenSampling(),
            max_tokens=max_tokens,
        )
        self.heard[seq.seq_id] = Heard(self.runner.now_s)
        self.scheduler.add(seq)
        return seq

    @staticmethod
    def text(agent: int, start: int, end: int) -> list[int]:
        """What stands at these positions of an agent's conversation, prompts and replies alike."""
        return [_token(agent, position) for position in range(start, end)]

    def step(self) -> None:
        plan = self.scheduler.schedule(self.runner.now_s)
        self._take(self.runner.decode(plan))
        if plan.prefill:
            self._take(self.runner.prefill(plan.prefill))

    def _take(self, output: StepOutput) -> None:
        for update in self.scheduler.update(output):
            self.heard[update.seq_id].times += [self.runner.now_s] * len(update.tokens)
            self.num_tokens += len(update.tokens)


def _worst_gap_s(times: list[float]) -> float:
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _token(agent: int, position: int) -> int:
    return (agent * 7919 + position * 31) % _VOCABULARY


@dataclass(frozen=True, slots=True)
class Result:
    tokens_per_s: float
    worst_gap_s: float
    passes_per_step: float
    copied_bytes: int
    num_tokens: int
    longest_decode_s: float  # with copies, of a step that also has prefill
    stall_s: float


def decode_rows(device: Device, lengths: Iterable[int], num_steps: int = 256) -> Result:
    """Rows of these lengths decode beside each other for so many steps. Their prefill is not counted.

    Each is sent once the one before it decodes: a row that waited would grow meanwhile.
    """
    serving = Serving(device, with_cache=False)
    for agent, length in enumerate(lengths):
        seq = serving.send(agent, 0, length, 1 << 20)
        while seq.status is not SequenceStatus.DECODING:
            serving.step()
    for _ in range(num_steps // 4):  # groups settle
        serving.step()
    runner, before = serving.runner, (serving.runner.now_s, serving.num_tokens)
    passes, steps, copied = runner.num_passes, runner.num_steps, runner.copied_bytes
    for _ in range(num_steps):
        serving.step()
    gaps = (_worst_gap_s(heard.times[-num_steps:]) for heard in serving.heard.values())
    return Result(
        (serving.num_tokens - before[1]) / (runner.now_s - before[0]),
        max(gaps),
        (runner.num_passes - passes) / (runner.num_steps - steps),
        runner.copied_bytes - copied,
        serving.num_tokens - before[1],
        runner.longest_decode_s,
        serving.pacer.max_stall_s,
    )


def serve_agents(device: Device, agents: Iterable[Iterable[Turn]]) -> Result:
    """All agents at once: each sends its next request when the last reply has ended and its pause is over."""
    serving = Serving(device, with_cache=True)
    turns = [list(agent) for agent in agents]
    due = [(0.0, agent, 0) for agent in range(len(turns))]
    waited: dict[int, tuple[Sequence, int, int]] = {}
    while due or waited:
        while due and due[0][0] <= serving.runner.now_s:
            _, agent, number = heapq.heappop(due)
            turn = turns[agent][number]
            seq = serving.send(agent, number, turn.prompt, turn.reply)
            waited[seq.seq_id] = (seq, agent, number)
        if not serving.scheduler.has_work:
            serving.runner.now_s = max(serving.runner.now_s, due[0][0])
            continue
        serving.step()
        for seq, agent, number in list(waited.values()):
            if seq.status is SequenceStatus.FINISHED:
                del waited[seq.seq_id]
                if number + 1 < len(turns[agent]):
                    pause_s = turns[agent][number].pause_s
                    heapq.heappush(due, (serving.runner.now_s + pause_s, agent, number + 1))
    runner = serving.runner
    return Result(
        serving.num_tokens / runner.now_s,
        max(heard.worst_gap_s for heard in serving.heard.values()),
        runner.num_passes / runner.num_steps,
        runner.copied_bytes,
        serving.num_tokens,
        runner.longest_decode_s,
        serving.pacer.max_stall_s,
    )
