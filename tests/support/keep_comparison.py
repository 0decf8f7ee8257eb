"""What a rule of what to keep costs with little room, beside the least recently used and the clairvoyant one."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mlx.cache.victims import worth

from .device_catalogue import CHIPS, SHAPES
from .device_model import Device
from .keep_policies import Clairvoyant, Future, least_recently_used
from .keep_simulation import Rules, Simulation, Spent
from .recorded_sessions import Request

DEVICES = {
    "dense": Device(CHIPS["M4 Max"], SHAPES["Qwen3 8B"]),
    "recurrent": Device(CHIPS["M3 Ultra"], SHAPES["Qwen3-Next 80B-A3B"]),
    "windows": Device(CHIPS["M4 Max"], SHAPES["gpt-oss 20B"]),
}
MEMORY_SHARE = 0.25  # of what the sessions want, beside a disk


class Tier(enum.Enum):
    MEMORY = "memory alone"
    BOTH = "the disk, beside a quarter in memory"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds that prompts took. With room for everything they take `least_s`."""

    least_s: float
    ours: Spent
    lru: Spent
    clairvoyant: Spent

    def again_s(self, spent: Spent) -> float:
        """Seconds of computing or reading again what had been computed."""
        return spent.total_s - self.least_s


class Comparisons:
    """One model under the same requests."""

    def __init__(self, device: Device, requests: Sequence[Request]):
        self._device = device
        self._requests = requests
        self._future = Future(requests)
        everything = Simulation(device, requests, rules=(worth, worth)).run()
        self.least_s, self.wanted_bytes = everything.total_s, everything.peak_bytes

    def at(self, share: float, tier: Tier) -> Comparison:
        ours, lru = (worth, worth), (least_recently_used, least_recently_used)
        clairvoyant = (Clairvoyant(self._future), Clairvoyant(self._future))
        spent = [self._spent(rules, share, tier) for rules in (ours, lru, clairvoyant)]
        return Comparison(self.least_s, *spent)

    def _spent(self, rules: Rules, share: float, tier: Tier) -> Spent:
        memory, disk = (MEMORY_SHARE, share) if tier is Tier.BOTH else (share, 0.0)
        return Simulation(
            self._device,
            self._requests,
            memory_bytes=int(memory * self.wanted_bytes),
            disk_bytes=int(disk * self.wanted_bytes),
            rules=rules,
        ).run()
