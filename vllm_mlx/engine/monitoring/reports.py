"""Asks the engine thread how things stand, for many askers and at little cost to it. Knows no status page."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

from ..engine import Engine
from .report import EngineReport

PATIENCE_S = 0.25  # a step may take seconds while a long prompt is read


class Reports:
    """Askers of one moment share one answer. Used on one event loop at a time."""

    def __init__(self, inspect: Callable[[Callable[[Engine], EngineReport]], "Future[EngineReport]"]):
        self._inspect = inspect
        self._asked: asyncio.Future[EngineReport] | None = None
        self._last: EngineReport | None = None
        self._last_s = 0.0

    async def latest(self) -> tuple[EngineReport, float]:
        """And its age in seconds: the last one, while the thread is in a long step. Raises EngineDead."""
        asked = self._ask()
        await asyncio.wait({asked}, timeout=None if self._last is None else PATIENCE_S)
        if asked.done():
            return asked.result(), 0.0
        assert self._last is not None, "without a last report the answer is waited for"
        return self._last, monotonic() - self._last_s

    def _ask(self) -> "asyncio.Future[EngineReport]":
        """The question under way, or a new one."""
        loop = asyncio.get_running_loop()
        if self._asked is None or self._asked.done() or self._asked.get_loop() is not loop:
            self._asked = asyncio.wrap_future(self._inspect(Engine.report), loop=loop)
            self._asked.add_done_callback(self._answered)
        return self._asked

    def _answered(self, asked: "asyncio.Future[EngineReport]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._last, self._last_s = asked.result(), monotonic()
