"""Watches the engine for operators: whether it is well, what it does now, and what it has done."""

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from ..core.config import EngineConfig
from ..prompt.processor import RequestProcessor
from .monitoring.counters import Totals
from .monitoring.schema import EngineReport
from .monitoring.status import Moment, build_facts, model_facts
from .preparing import PromptPool, place_in, stack_of

if TYPE_CHECKING:  # a server without an engine does not load MLX
    from .engine import EngineThread

logger = logging.getLogger(__name__)

PATIENCE_S = 0.25  # a step may take seconds while a long prompt is prefilled


class Monitor:
    """Watches the engine thread and the prompt threads, and asks the engine for its report.

    All callers of one moment share one report, which costs the engine thread little. Belongs to one event loop.
    """

    def __init__(self, config: EngineConfig, processor: RequestProcessor, thread: "EngineThread", pool: PromptPool):
        self.totals = Totals(started_s=monotonic(), stall_threshold_s=config.stall_ms / 1000)
        self.model_facts = model_facts(config, thread.facts, processor)
        self._build = build_facts()
        self._thread = thread
        self._pool = pool
        self._watchdog_s = config.watchdog_s
        self._logged_s: float | None = None  # start of the hanging step that was logged
        self._pending: asyncio.Future[EngineReport] | None = None
        self._last: EngineReport | None = None
        self._last_s = 0.0

    def error(self) -> str | None:
        """Why no request can be served; None if the engine is well."""
        return self.hanging() if self._thread.error is None else self._thread.error.message

    def hanging(self) -> str | None:
        """What hangs: the engine in a step, or many threads that prepare prompts. Returns None if nothing hangs."""
        return self._hanging_step() or self._pool.error()

    def _hanging_step(self) -> str | None:
        """Why the engine hangs, or None. The first call during a hanging step logs the stack."""
        started_s = self._thread.step_started_s
        if started_s is None or monotonic() - started_s < self._watchdog_s:
            return None
        stack = stack_of(self._thread.ident)
        if self._logged_s != started_s:
            self._logged_s = started_s
            logger.error("The engine hangs in a step:\n%s", "".join(stack.format()))
        return f"The engine has been in one step for {monotonic() - started_s:.0f} s{place_in(stack)}."

    async def moment(self) -> Moment:
        """All figures of this moment, with the previous report while a long step runs. Raises EngineDead."""
        self._thread.check_alive()
        pending = self._ask()
        await asyncio.wait({pending}, timeout=None if self._last is None else PATIENCE_S)
        if pending.done():
            report, age_s = pending.result(), 0.0
        else:
            assert self._last is not None, "the first report is always awaited"
            report, age_s = self._last, monotonic() - self._last_s
        return Moment(
            build=self._build,
            facts=self.model_facts,
            memory=self._thread.facts.memory,
            report=report,
            report_age_s=age_s,
            totals=self.totals,
            now=monotonic(),
        )

    def _ask(self) -> asyncio.Future[EngineReport]:
        loop = asyncio.get_running_loop()
        if self._pending is None or self._pending.done() or self._pending.get_loop() is not loop:
            self._pending = asyncio.wrap_future(self._thread.inspect(lambda engine: engine.report()), loop=loop)
            self._pending.add_done_callback(self._answered)
        return self._pending

    def _answered(self, pending: asyncio.Future[EngineReport]) -> None:
        if not pending.cancelled() and pending.exception() is None:
            self._last, self._last_s = pending.result(), monotonic()
