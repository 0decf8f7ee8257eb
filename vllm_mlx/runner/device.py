"""The machine's memory, MLX's limits, and the memory that MLX uses. It knows no model."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from ..core.memory import NO_OVERRUN, UNKNOWN_SYSTEM, Overrun, Pressure, SystemMemory, physical_memory, readable

# No Mac has verified these shares, sizes and intervals.
_SHARE_OF_RAM = 0.7  # if the device recommends nothing
_SHARE_OF_RECOMMENDED = 0.9  # share of Metal's recommended working set
_LIMIT_OF_RAM = 0.85
_LIMIT_OF_RECOMMENDED = 0.95  # beyond 1.0, macOS pages, and may end the process or crash
_CACHE_LIMIT = 2 << 30  # freed buffers that MLX may keep for reuse, where a chunk takes no more
_CLEAR_INTERVAL = 256  # decode steps between returns of freed buffers: MLX must then allocate again
_LOOK_INTERVAL = 16  # decode steps between looks at how many there are
_MAX_WIRED_SHARE = 0.65  # share of the machine's memory that weights may take to be wired
_MIN_UNWIRED = 8 << 30  # bytes that stay for the system and the caches if weights are wired
_PAGE = 16384  # bytes of a memory page on Apple silicon
_HEAP_BUFFER = 256  # MLX puts smaller buffers into one heap
_HEAP = 1 << 20  # bytes of that heap


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
    recommended_bytes: int | None  # Metal's recommended working set, another GPU's memory; None on a CPU

    @property
    def default_budget_bytes(self) -> int:
        if self.recommended_bytes is not None:
            return int(self.recommended_bytes * _SHARE_OF_RECOMMENDED)
        return int(self.total_bytes * _SHARE_OF_RAM)

    def limit_bytes(self, budget_bytes: int) -> int:
        """Return the memory limit: a safe share of the machine's memory, but at least the given budget."""
        if self.recommended_bytes is not None:
            return max(budget_bytes, int(self.recommended_bytes * _LIMIT_OF_RECOMMENDED))
        return max(budget_bytes, int(self.total_bytes * _LIMIT_OF_RAM))

    def process_limit_bytes(self, budget_bytes: int) -> int:
        """Return the limit of the memory of this process, with the interpreter and libraries."""
        return max(self.limit_bytes(budget_bytes), int(self.total_bytes * _LIMIT_OF_RAM))


def max_stored_buffers() -> int | None:
    """Live buffers that stored state may hold: half of those that MLX allows. None if the device has no such limit.

    The other half is for weights, rows, temporaries and freed buffers. Beyond the limit every allocation fails
    (`MetalAllocator::malloc` in mlx/backend/metal/allocator.cpp).
    """
    limit = mx.device_info().get("resource_limit")
    return int(limit) // 2 if limit else None


def device_memory() -> DeviceMemory:
    info = mx.device_info()
    own = info.get("total_memory")  # a GPU reports it if it does not share the machine's memory
    recommended = info.get("max_recommended_working_set_size") or own
    return DeviceMemory(int(own or physical_memory()), int(recommended) if recommended else None)


def apply_limits(budget_bytes: int) -> None:
    """Limit the bytes that MLX allocates before it waits for running work, and the freed buffers that it keeps.

    No wired limit is set before the weights are loaded: a residency set that grows and shrinks with caches is the
    reported trigger of kernel panics that restart the Mac.
    """
    device = device_memory()
    mx.set_memory_limit(max(device.limit_bytes(budget_bytes), mx.get_active_memory() + budget_bytes))
    mx.set_cache_limit(cache_limit_bytes(budget_bytes))


def cache_limit_bytes(budget_bytes: int, transient_bytes: int = 0) -> int:
    """Freed buffers that MLX may keep: at least those of one chunk, or each of its layers would allocate them again.

    `transient_bytes` are a part of the budget, so that buffers kept for them do not exceed it.
    """
    return max(min(_CACHE_LIMIT, budget_bytes // 4), transient_bytes)


def wire_weights(weights: Iterable[mx.array], device: DeviceMemory) -> str | None:
    """Wire the loaded weights and nothing that comes later. Returns why they are not wired; None if they are.

    Call it after the load, when the weights are the only live arrays. MLX puts every buffer that fits below the wired
    limit into a residency set (`ResidencySets::insert` in mlx/backend/metal/resident.cpp). A limit that the weights
    fill exactly leaves no room for a later buffer, so the set never changes again.
    """
    if device.recommended_bytes is None:
        return "this machine has no Metal device"
    mx.clear_cache()
    limit = resident_bytes((weight.nbytes for weight in weights), mx.get_active_memory())
    if limit > device.total_bytes * _MAX_WIRED_SHARE or device.total_bytes - limit < _MIN_UNWIRED:
        return (
            f"the weights take {readable(limit)} of {readable(device.total_bytes)}; at most "
            f"{_MAX_WIRED_SHARE:.0%} are wired, and {readable(_MIN_UNWIRED)} stay free for the system"
        )
    if limit > device.recommended_bytes:
        return "the weights exceed the memory that Metal recommends"
    mx.set_wired_limit(limit)
    return None


def resident_bytes(weights: Iterable[int], active_bytes: int) -> int:
    """Return bytes that a residency set counts if `active_bytes` are live, weights of the given sizes among them.

    MLX counts a buffer above a page in whole pages, as the set does, and smaller ones by their length; a tiny one lies
    in a heap, which the set counts as one allocation (`MetalAllocator::malloc` in mlx/backend/metal/allocator.cpp).
    """
    small = [size for size in weights if size <= _PAGE]
    return active_bytes + _HEAP + sum(-size if size < _HEAP_BUFFER else _PAGE - size for size in small)


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    active_bytes: int
    peak_bytes: int
    cache_bytes: int  # freed buffers that MLX keeps
    limit_bytes: int  # beyond it, rows and caches are evicted
    system: SystemMemory = UNKNOWN_SYSTEM


class DeviceWatch:
    """Measures the memory that MLX and this process use, step by step."""

    def __init__(
        self,
        limit_bytes: int,
        process_limit_bytes: int | None = None,
        system: Callable[[], SystemMemory] = lambda: UNKNOWN_SYSTEM,
        cache_limit_bytes: int = _CACHE_LIMIT,
    ):
        """`process_limit_bytes` bounds the footprint of the process as `system` reports it.

        MLX may keep `cache_limit_bytes` of freed buffers.
        """
        self._cache_limit_bytes = cache_limit_bytes
        self._num_steps = 0
        self.limit_bytes = limit_bytes
        self._process_limit_bytes = process_limit_bytes or limit_bytes
        self.system = system
        self._sample = UNKNOWN_SYSTEM
        self._sampled_cache_bytes = 0  # freed buffers that the sampled footprint counts
        self._is_new = False  # `overrun` has not seen the sample yet
        self._reported = Pressure.NORMAL  # by `overrun`
        self._peak_bytes = 0
        mx.set_cache_limit(cache_limit_bytes)
        mx.reset_peak_memory()

    def raise_cache_limit(self, num_bytes: int) -> None:
        """Let MLX keep at least this many bytes of freed buffers, for another model."""
        self._cache_limit_bytes = max(self._cache_limit_bytes, num_bytes)
        mx.set_cache_limit(self._cache_limit_bytes)

    def return_buffers(self) -> None:
        """Give freed buffers back to the system now and then, earlier if there are many. Called once a decode step."""
        self._num_steps += 1
        is_due = self._num_steps % _CLEAR_INTERVAL == 0
        if is_due or (self._num_steps % _LOOK_INTERVAL == 0 and mx.get_cache_memory() > self._cache_limit_bytes // 2):
            mx.clear_cache()

    @property
    def has_news(self) -> bool:
        """Return whether `overrun` would report other pressure than before, or too large a footprint."""
        pressure = self._sampled().pressure or Pressure.NORMAL
        return self._is_new and (pressure is not self._reported or self._excess_bytes > 0)

    @property
    def is_under_pressure(self) -> bool:
        return (self._sampled().pressure or Pressure.NORMAL) is not Pressure.NORMAL

    def overrun(self) -> Overrun:
        """Return the bytes used beyond the limit since the last call, and the pressure of other programs."""
        device, system = self._device_overrun(), self._sampled()
        pressure, excess = system.pressure or Pressure.NORMAL, 0
        if self._is_new:  # an older sample does not show the memory freed after it
            excess = self._excess_bytes
            if pressure is not Pressure.NORMAL:
                mx.clear_cache()
        self._is_new, self._reported = False, pressure
        return Overrun(
            peak_bytes=max(device.peak_bytes, excess), kept_bytes=max(device.kept_bytes, excess), pressure=pressure
        )

    @property
    def _excess_bytes(self) -> int:
        """Return bytes that the process uses beyond its limit, by the last sample."""
        footprint = (self._sample.footprint_bytes or 0) - self._sampled_cache_bytes
        return max(0, footprint - self._process_limit_bytes)

    def _sampled(self) -> SystemMemory:
        """Return the system's figures. Each sample of the footprint includes the freed buffers that MLX keeps then."""
        system = self.system()
        if system is not self._sample:
            self._sample, self._sampled_cache_bytes, self._is_new = system, mx.get_cache_memory(), True
        return system

    def _device_overrun(self) -> Overrun:
        if not _measuring_peak.acquire(blocking=False):
            return NO_OVERRUN
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        _measuring_peak.release()
        self._peak_bytes = max(self._peak_bytes, peak)
        if peak <= self.limit_bytes:
            return NO_OVERRUN
        return Overrun(peak_bytes=peak - self.limit_bytes, kept_bytes=max(0, active - self.limit_bytes))

    def usage(self) -> DeviceUsage:
        peak = max(self._peak_bytes, mx.get_peak_memory())
        return DeviceUsage(mx.get_active_memory(), peak, mx.get_cache_memory(), self.limit_bytes, self._sampled())
