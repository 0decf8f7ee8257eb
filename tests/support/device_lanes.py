"""The real engine with several models on one simulated device. Time is virtual, and nothing is computed."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

from vllm_mlx.core.config import EngineConfig, ModelInfo
from vllm_mlx.core.errors import ModelUnavailable
from vllm_mlx.core.memory import NO_OVERRUN, MemoryBudget, Overrun
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import SequenceUpdate
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.lane import Assembly, ServedModel, Source
from vllm_mlx.engine.monitoring.schema import EngineFacts
from vllm_mlx.runner.calibrate import Calibration
from vllm_mlx.scheduler.scheduler import Scheduler

from .device_catalogue import CHIPS, SHAPES
from .device_model import Device
from .device_runner import Clock, SimulatedRunner, footprint
from .device_serving import BUDGET_SHARE, TRANSIENT_BYTES, pacer_of


class Watch:
    """A device that always has memory."""

    has_news = False

    def overrun(self) -> Overrun:
        return NO_OVERRUN


@dataclass(eq=False, kw_only=True)
class SimulatedAssembly(Assembly):
    device: Device
    clock: Clock

    def begin(self) -> Any:
        return SimulatedLoading(self.clock, self.facts.info.weights_bytes)

    def run(self, model: object) -> Any:
        return SimulatedRunner(self.device, lambda seq, position: position % 1000, self.clock)

    def measure(self, model: object) -> Any:
        raise AssertionError("all figures are known")


class Lanes:
    """Requests come in for several models, by their positions, and the device's one clock runs."""

    def __init__(self, *devices: Device, memory_bytes: int | None = None, pinned: int | None = None, idle_s: float = 0):
        """With `memory_bytes`, which all share, models are loaded and unloaded; the one at `pinned` stays."""
        self.clock = Clock()
        self._memory_bytes, self._pinned, self._idle_s = memory_bytes, pinned, idle_s
        self.devices = devices
        self.num_sent = 0
        self.heard: dict[int, list[float]] = {}  # when each token of a reply was delivered, by the sequence's id
        self.busy_s = [0.0] * len(devices)
        models = [self._model(device) for device in devices]
        self.engine = LLMEngine(models, cast(Any, Watch()), clock=lambda: self.clock.now_s)
        self.engine.listen(self._deliver)

    def _model(self, device: Device) -> ServedModel:
        weights_bytes = int(device.shape.weights_bytes)
        total_bytes = self._memory_bytes or int(BUDGET_SHARE * device.chip.memory_bytes)
        self.total_bytes = total_bytes
        memory = MemoryBudget(total_bytes=total_bytes, weights_bytes=weights_bytes, transient_bytes=TRANSIENT_BYTES)
        row, config = footprint(device.shape), EngineConfig(model=device.shape.name, idle_unload_s=self._idle_s)
        scheduler = Scheduler(config, memory=memory, footprint=row, pacer=pacer_of(device))
        info = ModelInfo(
            model=device.shape.name,
            architecture="simulated",
            max_model_len=1 << 20,
            weights_bytes=memory.weights_bytes,
            vocab_size=32_000,
            takes_images=False,
            created=0,
        )
        calibration = Calibration(tokens_per_s=1.0, overhead_s=0.0, chunk_bytes_per_token=0.0)
        facts = EngineFacts(info=info, memory=memory, footprint=row, calibration=calibration)

        pin = self._pinned is not None and device is self.devices[self._pinned]
        assembly = SimulatedAssembly(
            source=Source(name=device.shape.name, config=config, checkpoint=cast(Any, None), pin=pin),
            scheduler=scheduler,
            facts=facts,
            identity="",
            room_bytes=weights_bytes // 40,
            load_s=weights_bytes / READ_BYTES_PER_S,
            device=device,
            clock=self.clock,
        )
        model = ServedModel(assembly)
        model.start(cast(Any, None))
        return model

    def send(self, model: int, num_tokens: int, max_tokens: int, tenant: str = "") -> int:
        """Return the id of the sequence."""
        self.num_sent += 1
        ids = tuple((self.num_sent * 7919 + place * 31) % 32_000 for place in range(num_tokens))
        seq = Sequence(
            seq_id=self.num_sent,
            prompt=PromptInputs(token_ids=ids),
            sampling=TokenSampling(),
            max_tokens=max_tokens,
            tenant=tenant,
        )
        seq.model = model
        self.heard[seq.seq_id] = []
        self.engine.add([seq])
        return seq.seq_id

    def run(self, until_s: float) -> None:
        """Step until a time, or until nothing is left to do."""
        while self.engine.has_work and self.clock.now_s < until_s:
            self.step()

    def first_token_s(self, seq_id: int) -> float:
        """Run until a reply begins."""
        while not self.heard[seq_id]:
            self.step()
        return self.heard[seq_id][0]

    def step(self) -> None:
        before_s, before = self.clock.now_s, [self._num_calls(model) for model in self.engine.models]
        self.engine.step()
        for at, (model, num_calls) in enumerate(zip(self.engine.models, before, strict=True)):
            if self._num_calls(model) > num_calls:
                self.busy_s[at] += self.clock.now_s - before_s
        self.engine.move()

    @staticmethod
    def _num_calls(model: ServedModel) -> int:
        return int(cast(Any, model.lane).runner.num_calls)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.error is None
            self.heard[update.seq_id] += [self.clock.now_s] * len(update.tokens)

    def worst_gap_s(self, seq_id: int, since_s: float) -> float:
        times = [heard_s for heard_s in self.heard[seq_id] if heard_s >= since_s]
        return max(after - before for before, after in pairwise(times))


READ_BYTES_PER_S = 3e9
_NUM_SLICES = 5
_LOOK_S = 0.02


@dataclass
class SimulatedLoading:
    """Weights that are read in slices. The clock goes on meanwhile."""

    clock: Clock
    num_bytes: int
    progress: float = 0.0
    build_s: float = 0.0
    num_read: int = 0

    def advance(self) -> object:
        self.clock.now_s += self.num_bytes / READ_BYTES_PER_S / _NUM_SLICES
        self.num_read += 1
        return self if self.num_read == _NUM_SLICES else None


@dataclass
class Actions:
    """What an engine whose models share too little memory does, in its order, while drawn requests come in."""

    lanes: Lanes
    seed: int
    pauses_s: tuple[float, ...] = (0.0, 0.02, 0.3, 2.0, 9.0)
    num_requests: int = 24
    requests: tuple[tuple[int, int], ...] = ((200, 20), (2000, 60), (8000, 100), (11_000, 400))  # tokens of both parts
    lines: list[str] = field(default_factory=list)
    _before: list[tuple[str, bool, int]] = field(default_factory=list)

    def record(self) -> list[str]:
        """Return one line for each action."""
        lanes, drawn = self.lanes, random.Random(self.seed)
        lanes.engine.listen(self._deliver)
        with patch.object(time, "monotonic", lambda: lanes.clock.now_s):
            self._settle()
            self._before = self._states()
            for at_s in self._times(drawn):
                self._run_until(at_s)
                if drawn.random() < 0.15:
                    self._command(drawn)
                    continue
                model = drawn.randrange(len(lanes.devices))
                length, num_tokens = drawn.choice(self.requests)
                lanes.send(model, length, num_tokens, tenant=drawn.choice("ab"))
            while any(lane.waiting or lane.is_busy for lane in lanes.engine.models):
                self._run_until(lanes.clock.now_s + 1)
        return self.lines

    def _times(self, drawn: random.Random) -> Iterator[float]:
        at_s = 1.0
        for _ in range(self.num_requests):
            at_s += drawn.choice(self.pauses_s)
            yield at_s

    def _command(self, drawn: random.Random) -> None:
        engine = self.lanes.engine
        model = drawn.choice(engine.models)
        if drawn.random() < 0.5:
            self.lines.append(f"command: load {model.name}")
            try:
                engine.load(model)
            except ModelUnavailable:
                self.lines.append("refused")
        elif not model.is_busy:
            self.lines.append(f"command: unload {model.name}")
            engine.unload(model)
        self._note()

    def _settle(self) -> None:
        """Let models leave until all have room, as at a start."""
        engine = self.lanes.engine
        for model in reversed(engine.models):
            if sum(each.held_bytes for each in engine.models) + TRANSIENT_BYTES > self.lanes.total_bytes:
                engine.evict(model)

    def _run_until(self, end_s: float) -> None:
        lanes, engine = self.lanes, self.lanes.engine
        while lanes.clock.now_s < end_s:
            if engine.has_work:
                engine.step()
                self._note()
            engine.move()
            self._note()
            if not engine.is_busy:
                lanes.clock.now_s += _LOOK_S
                if not any(model.waiting for model in engine.models):
                    lanes.clock.now_s = min(end_s, lanes.clock.now_s + 0.5)

    def _states(self) -> list[tuple[str, bool, int]]:
        return [(model.state, model.is_yielding, model.scheduler.num_preemptions) for model in self.lanes.engine.models]

    def _note(self) -> None:
        for lane, before, now in zip(self.lanes.engine.models, self._before, states := self._states(), strict=True):
            if now[0] != before[0]:
                self.lines.append(f"{now[0]} {lane.name}")
            if now[1] != before[1]:
                self.lines.append(f"{'yields' if now[1] else 'stays'} {lane.name}")
            if now[2] != before[2]:
                self.lines.append(f"preempts {lane.name}")
        self._before = states

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.error is None
            if not self.lanes.heard[update.seq_id]:
                self.lanes.heard[update.seq_id].append(self.lanes.clock.now_s)
                self.lines.append(f"admit {update.seq_id}")
            if update.finish_reason is not None:
                self.lines.append(f"end {update.seq_id}")


def residency_actions() -> str:
    """Return what engines of two and three models do, in some memories that hold not all of them."""
    one, three = ("Qwen3 8B", "Qwen3 4B"), ("Qwen3 8B", "Qwen3 4B", "Qwen3 0.6B")
    parts: list[tuple[str, tuple[str, ...], float, dict[str, Any], dict[str, Any]]] = [
        ("room for one of two", one, 8e9, {}, {}),
        ("room for one of two, which leave when idle", one, 8e9, {"idle_s": 4.0}, {"pauses_s": (9.0, 30.0)}),
        ("room for two of three", three, 10e9, {}, {"seed": 1}),
        ("a pinned one and room for one of two", (three[1], three[0], three[2]), 11e9, {"pinned": 0}, {"seed": 1}),
        ("a row that outgrows", three[1:], 4.1e9, {}, {"seed": 3, "num_requests": 3, "requests": ((200, 3500),)}),
    ]
    text = ""
    for title, names, memory_bytes, options, drawn in parts:
        devices = [Device(CHIPS["M4 Max"], SHAPES[name]) for name in names]
        lanes = Lanes(*devices, memory_bytes=int(memory_bytes), **options)
        text += "\n".join([f"# {title}", *Actions(lanes, **{"seed": 0, **drawn}).record(), "", ""])
    return text
