"""The state of the engine between two steps, and how the event loop asks for it at little cost to the engine thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic

from ...cache.stats import TreeStats
from ...runner.device import DeviceUsage

PATIENCE_S = 0.25  # a step may take seconds while a long prompt is prefilled


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReport:
    """The state of the cache of image features."""

    num_images: int
    num_encoded: int  # runs of the vision encoder
    longest_encode_s: float
    num_evictions: int
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The state of the engine between two steps."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    pool_bytes: int  # memory for rows and caches: lowered from the plan if the device has less memory
    num_shortened: int  # times that memory pressure made prefill chunks shorter
    num_restarts: int  # restarts of rows that lost their state to a fault that another row may have caused
    live_bytes: int  # state of all rows, including padding
    device: DeviceUsage
    cache: TreeStats | None  # None: the prefix cache is off
    num_skipped_captures: int  # snapshots that were not stored because memory was short
    media: MediaReport | None = None  # None: the model takes no images


class ReportDesk:
    """Gets reports from the engine thread. All callers of one moment share one answer. Belongs to one event loop."""

    def __init__(self, request_report: Callable[[], "Future[EngineReport]"]):
        self._request_report = request_report
        self._pending: asyncio.Future[EngineReport] | None = None
        self._last: EngineReport | None = None
        self._last_s = 0.0

    async def latest(self) -> tuple[EngineReport, float]:
        """Return the report and its age in seconds: the previous one while a long step runs. Raises EngineDead."""
        pending = self._ask()
        await asyncio.wait({pending}, timeout=None if self._last is None else PATIENCE_S)
        if pending.done():
            return pending.result(), 0.0
        assert self._last is not None, "the first report is always awaited"
        return self._last, monotonic() - self._last_s

    def _ask(self) -> "asyncio.Future[EngineReport]":
        loop = asyncio.get_running_loop()
        if self._pending is None or self._pending.done() or self._pending.get_loop() is not loop:
            self._pending = asyncio.wrap_future(self._request_report(), loop=loop)
            self._pending.add_done_callback(self._answered)
        return self._pending

    def _answered(self, pending: "asyncio.Future[EngineReport]") -> None:
        if not pending.cancelled() and pending.exception() is None:
            self._last, self._last_s = pending.result(), monotonic()
