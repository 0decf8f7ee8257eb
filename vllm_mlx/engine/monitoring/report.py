"""Figures about the engine, as plain values. Asks nobody."""

from dataclasses import dataclass

from ...cache.stats import TreeStats
from ...runner.device import DeviceUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReport:
    """What is kept of encoded images."""

    num_images: int
    num_encoded: int  # runs of the vision tower
    longest_encode_s: float
    num_evictions: int
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Of one moment between two steps."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    pool_bytes: int  # that rows and caches may take: less than reckoned where the device turned out to have less
    num_shortened: int  # times that prefill chunks became shorter for want of memory
    num_restarts: int  # of rows that lost their state to a fault which may have been another row's
    live_bytes: int  # of all rows, their padding included
    device: DeviceUsage
    cache: TreeStats | None  # None: the prefix cache is off
    num_skipped_captures: int  # state not kept for want of memory
    media: MediaReport | None = None  # None: the model takes no images
