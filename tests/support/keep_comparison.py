"""What a rule of what to keep costs with little room, beside the least recently used and the clairvoyant one."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mlx.cache.victims import Worth, worth

from .device_catalogue import CHIPS, SHAPES
from .device_model import Device
from .keep_policies import Clairvoyant, Future, least_recently_used
from .keep_simulation import Simulation
from .recorded_sessions import Request

DEVICES = {
    "dense": Device(CHIPS["M4 Max"], SHAPES["Qwen3 8B"]),
    "recurrent": Device(CHIPS["M3 Ultra"], SHAPES["Qwen3-Next 80B-A3B"]),
    "windows": Device(CHIPS["M4 Max"], SHAPES["gpt-oss 20B"]),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds that prompts took under each rule."""

    ours_s: float
    lru_s: float
    clairvoyant_s: float


class Comparisons:
    """One model under the same requests. With room for everything prompts take `least_s`."""

    def __init__(self, device: Device, requests: Sequence[Request]):
        self._device = device
        self._requests = requests
        self._future = Future(requests)
        everything = Simulation(device, requests, rule=worth).run()
        self.least_s, self.wanted_bytes = everything.computed_s, everything.peak_bytes

    def at(self, share: float) -> Comparison:
        rules: tuple[Worth, ...] = (worth, least_recently_used, Clairvoyant(self._future))
        memory_bytes = int(share * self.wanted_bytes)
        simulations = (Simulation(self._device, self._requests, memory_bytes=memory_bytes, rule=rule) for rule in rules)
        return Comparison(*(simulation.run().computed_s for simulation in simulations))
