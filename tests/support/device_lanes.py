"""The real engine with several models on one simulated device. Time is virtual, and nothing is computed."""

from itertools import pairwise
from typing import Any, cast

from vllm_mlx.core.config import EngineConfig, ModelInfo
from vllm_mlx.core.memory import NO_OVERRUN, MemoryBudget, Overrun
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import SequenceUpdate
from vllm_mlx.engine.engine import Engine
from vllm_mlx.engine.lane import Lane, Reload
from vllm_mlx.engine.monitoring.schema import EngineFacts
from vllm_mlx.runner.calibrate import Calibration
from vllm_mlx.scheduler.scheduler import Scheduler

from .device_model import Device
from .device_runner import Clock, Manner, SimulatedRunner, footprint
from .device_serving import BUDGET_SHARE, TRANSIENT_BYTES, pacer_of


class Watch:
    """A device that always has memory."""

    has_news = False

    def overrun(self) -> Overrun:
        return NO_OVERRUN


class Lanes:
    """Requests come in for several models, by their positions, and the device's one clock runs."""

    def __init__(self, *devices: Device):
        self.clock = Clock()
        self.devices = devices
        self.num_sent = 0
        self.heard: dict[int, list[float]] = {}  # when each token of a reply was delivered, by the sequence's id
        self.busy_s = [0.0] * len(devices)
        lanes = [self._lane(device) for device in devices]
        self.engine = Engine(lanes, cast(Any, Watch()), clock=lambda: self.clock.now_s)

    def _lane(self, device: Device) -> Lane:
        chip, others = device.chip, sum(other.shape.weights_bytes for other in self.devices if other is not device)
        memory = MemoryBudget(
            total_bytes=int(BUDGET_SHARE * chip.memory_bytes - others),
            weights_bytes=int(device.shape.weights_bytes),
            transient_bytes=TRANSIENT_BYTES,
        )
        row = footprint(device.shape)
        pacer = pacer_of(device)
        scheduler = Scheduler(EngineConfig(model=device.shape.name), memory=memory, footprint=row, pacer=pacer)
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
        runner = SimulatedRunner(device, Manner.TOGETHER, lambda seq, position: position % 1000, self.clock)
        reload = Reload(begin=_never, run=_never, weights_bytes=0, room_bytes=0)
        return Lane(scheduler, cast(Any, runner), reload, facts)

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
        before_s, before = self.clock.now_s, [lane.runner.num_calls for lane in self.engine.lanes]  # type: ignore[union-attr]
        self.engine.step(self._deliver)
        for at, (lane, num_calls) in enumerate(zip(self.engine.lanes, before, strict=True)):
            if lane.runner.num_calls > num_calls:  # type: ignore[union-attr]
                self.busy_s[at] += self.clock.now_s - before_s
        self.engine.move(self._deliver)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.error is None
            self.heard[update.seq_id] += [self.clock.now_s] * len(update.tokens)

    def worst_gap_s(self, seq_id: int, since_s: float) -> float:
        times = [heard_s for heard_s in self.heard[seq_id] if heard_s >= since_s]
        return max(after - before for before, after in pairwise(times))


def _never(*_: object) -> Any:
    raise AssertionError("all models stay in memory")
