"""The machine's memory and MLX's limits. One look at the hardware; holds no model."""

from dataclasses import dataclass

import mlx.core as mx

from ..core.machine import physical_memory

_SHARE_OF_RAM = 0.7  # where the device recommends nothing
_SHARE_OF_RECOMMENDED = 0.9  # of Metal's recommended working set
_CACHE_LIMIT = 2 << 30  # freed buffers that MLX may keep for reuse


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total_bytes: int  # physical
    recommended_bytes: int | None  # what Metal lets one process keep wired; None off Metal

    @property
    def default_budget_bytes(self) -> int:
        if self.recommended_bytes is not None:
            return int(self.recommended_bytes * _SHARE_OF_RECOMMENDED)
        return int(self.total_bytes * _SHARE_OF_RAM)


def device_memory() -> DeviceMemory:
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return DeviceMemory(physical_memory(), int(recommended) if recommended else None)


def apply_limits(budget_bytes: int) -> None:
    """Bound MLX's own cache of freed buffers and, on Metal, keep the working set wired."""
    mx.set_cache_limit(min(_CACHE_LIMIT, budget_bytes // 4))
    recommended = device_memory().recommended_bytes
    if recommended is not None:
        mx.set_wired_limit(min(recommended, budget_bytes))


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    active_bytes: int
    peak_bytes: int
    cache_bytes: int  # freed buffers that MLX keeps


def device_usage() -> DeviceUsage:
    return DeviceUsage(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())
