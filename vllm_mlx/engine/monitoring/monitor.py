"""Watches the threads of the engine, and asks the engine for its report."""

import asyncio
import logging
import time
from collections.abc import Sequence as Items

from ...core.config import EngineConfig
from ..engine import EngineThread, LLMEngine
from ..front import Front
from ..preparing import PromptPool, place_in, stack_of
from ..sizing import budget_of
from .counters import Totals
from .schema import EngineReport
from .status import Moment

logger = logging.getLogger(__name__)
_PATIENCE_S = 0.25  # a step may take seconds while a long prompt is prefilled


class Monitor:
    """Watches the engine thread and the prompt threads, and asks the engine for its report.

    All callers of one moment share one report, which costs the engine thread little. Belongs to one event loop.
    """

    def __init__(self, config: EngineConfig, fronts: Items[Front], thread: EngineThread, pool: PromptPool):
        self._started_s, self._stall_s = time.monotonic(), config.stall_ms / 1000
        self._whole = Totals(started_s=self._started_s, stall_threshold_s=self._stall_s)
        self.totals: list[Totals] = []  # by the positions of the models
        for _ in fronts:
            self.add()
        self._fronts, self._total_bytes = fronts, budget_of(config).total_bytes
        self._thread = thread
        self._pool = pool
        self._watchdog_s = config.watchdog_s
        self._logged_s: float | None = None  # start of the hanging step that was logged
        self._pending: asyncio.Future[EngineReport] | None = None
        self._last: EngineReport | None = None
        self._last_s = 0.0

    def add(self) -> None:
        self.totals.append(Totals(started_s=self._started_s, stall_threshold_s=self._stall_s, of_all=self._whole))

    def error(self) -> str | None:
        """Return the reason why no request can be served; None if the engine is well."""
        return self.hanging() if self._thread.error is None else self._thread.error.message

    def hanging(self) -> str | None:
        """Describe the part that hangs: the engine in a step, or many prompt threads. None if nothing hangs."""
        return self._hanging_step() or self._pool.error()

    def _hanging_step(self) -> str | None:
        """Return the reason why the engine hangs, or None. The first call during a hanging step logs the stack."""
        started_s = self._thread.step_started_s
        if started_s is None or time.monotonic() - started_s < self._watchdog_s:
            return None
        stack = stack_of(self._thread.ident)
        if self._logged_s != started_s:
            self._logged_s = started_s
            logger.error("The engine hangs in a step:\n%s", "".join(stack.format()))
        return f"The engine has been in one step for {time.monotonic() - started_s:.0f} s{place_in(stack)}."

    async def moment(self) -> Moment:
        """Return all figures of this moment, with the previous report while a long step runs. Raises EngineDead."""
        self._thread.check_alive()
        pending = self._ask()
        await asyncio.wait({pending}, timeout=None if self._last is None else _PATIENCE_S)
        if pending.done():
            report, age_s = pending.result(), 0.0
        else:
            assert self._last is not None, "the first report is always awaited"
            report, age_s = self._last, time.monotonic() - self._last_s
        return Moment(
            fronts=self._fronts,
            report=report,
            report_age_s=age_s,
            totals=self._whole,
            totals_of_models=self.totals,
            total_bytes=self._total_bytes,
            now=time.monotonic(),
        )

    def _ask(self) -> asyncio.Future[EngineReport]:
        loop = asyncio.get_running_loop()
        if self._pending is None or self._pending.done() or self._pending.get_loop() is not loop:
            self._pending = asyncio.wrap_future(self._thread.inspect(LLMEngine.report), loop=loop)
            self._pending.add_done_callback(self._answered)
        return self._pending

    def _answered(self, pending: asyncio.Future[EngineReport]) -> None:
        if not pending.cancelled() and pending.exception() is None:
            self._last, self._last_s = pending.result(), time.monotonic()
