"""The machine's memory, MLX's limits, and the memory that MLX uses. It knows no model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from ..core.memory import NO_OVERRUN, Overrun, physical_memory

_SHARE_OF_RAM = 0.7  # if the device recommends nothing
_SHARE_OF_RECOMMENDED = 0.9  # share of Metal's recommended working set
_LIMIT_OF_RAM = 0.85
_LIMIT_OF_RECOMMENDED = 0.95  # beyond 1.0, macOS pages, and may end the process or crash
_CACHE_LIMIT = 2 << 30  # freed buffers that MLX may keep for reuse


_measuring_peak = threading.Lock()  # MLX has one peak counter per process
T = TypeVar("T")


def peak_of(work: Callable[[], T]) -> tuple[T, int]:
    """Run the work. Returns its result and the bytes that it allocated at its peak."""
    with _measuring_peak:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        done = work()
        return done, max(0, mx.get_peak_memory() - before)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total_bytes: int  # physical
    recommended_bytes: int | None  # Metal's recommended working set; None without Metal

    @property
    def default_budget_bytes(self) -> int:
        if self.recommended_bytes is not None:
            return int(self.recommended_bytes * _SHARE_OF_RECOMMENDED)
        return int(self.total_bytes * _SHARE_OF_RAM)

    def limit_bytes(self, budget_bytes: int) -> int:
        """The memory limit: a safe share of the machine's memory, but at least the given budget."""
        if self.recommended_bytes is not None:
            return max(budget_bytes, int(self.recommended_bytes * _LIMIT_OF_RECOMMENDED))
        return max(budget_bytes, int(self.total_bytes * _LIMIT_OF_RAM))


def device_memory() -> DeviceMemory:
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return DeviceMemory(physical_memory(), int(recommended) if recommended else None)


def apply_limits(budget_bytes: int) -> None:
    """Limit the bytes that MLX allocates before it waits for running work, and the freed buffers that it keeps.

    No wired limit is set. A residency set that grows and shrinks with caches is the reported trigger of kernel panics
    that restart the Mac.
    """
    device = device_memory()
    mx.set_memory_limit(max(device.limit_bytes(budget_bytes), mx.get_active_memory() + budget_bytes))
    mx.set_cache_limit(min(_CACHE_LIMIT, budget_bytes // 4))


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    active_bytes: int
    peak_bytes: int
    cache_bytes: int  # freed buffers that MLX keeps
    limit_bytes: int  # beyond it, rows and caches are evicted


class DeviceWatch:
    """Measures the memory that MLX uses, step by step."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._peak_bytes = 0
        mx.reset_peak_memory()

    def overrun(self) -> Overrun:
        """The bytes used beyond the limit since the last call."""
        if not _measuring_peak.acquire(blocking=False):
            return NO_OVERRUN
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        _measuring_peak.release()
        self._peak_bytes = max(self._peak_bytes, peak)
        if peak <= self._limit_bytes:
            return NO_OVERRUN
        return Overrun(peak_bytes=peak - self._limit_bytes, kept_bytes=max(0, active - self._limit_bytes))

    def usage(self) -> DeviceUsage:
        peak = max(self._peak_bytes, mx.get_peak_memory())
        return DeviceUsage(mx.get_active_memory(), peak, mx.get_cache_memory(), self._limit_bytes)
