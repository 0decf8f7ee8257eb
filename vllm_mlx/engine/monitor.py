"""Answers what operators ask: whether the engine is well, what it does now, and what it has done."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from time import monotonic

from prometheus_client.core import Metric

from ..core.config import EngineConfig
from ..core.step import SequenceUpdate
from ..prompt.processor import RequestProcessor
from .engine import Engine, EngineThread
from .monitoring.counters import ReplyStats, Totals
from .monitoring.prometheus import metric_families
from .monitoring.schema import EngineReport, EngineStatus
from .monitoring.status import Moment, build_facts, engine_status, model_facts
from .prompt_pool import PromptPool, place_in, stack_of

logger = logging.getLogger(__name__)


class Monitor:
    """Owns the counters of all replies, and asks the engine thread for its part. Belongs to one event loop."""

    def __init__(self, config: EngineConfig, processor: RequestProcessor, thread: EngineThread, pool: PromptPool):
        self._thread = thread
        self._pool = pool
        self._memory = thread.facts.memory
        self._build = build_facts()
        self.model_facts = model_facts(config, thread.facts, processor)
        self._totals = Totals(started_s=time.monotonic(), stall_threshold_s=config.max_stall_ms / 1000)
        self._desk = ReportDesk(lambda: thread.inspect(Engine.report))
        self._watchdog = Watchdog(
            limit_s=config.watchdog_s,
            step_started_s=lambda: thread.step_started_s,
            thread_id=lambda: thread.ident,
        )

    def count_update(self, stats: ReplyStats, update: SequenceUpdate) -> None:
        self._totals.take(stats, update, time.monotonic())

    def count_ended(self, replies: Iterable[ReplyStats]) -> None:
        """Count a request that has ended, with all of its replies."""
        self._totals.requests += 1
        for reply in replies:
            self._totals.end(reply)

    def hanging(self) -> str | None:
        """What hangs: the engine in a step, or all threads that prepare prompts. None: nothing hangs."""
        return self._watchdog.error() or self._pool.error()

    def error(self) -> str | None:
        """Why no request can be served; None if the engine is well."""
        return self.hanging() if self._thread.error is None else self._thread.error.message

    async def status(self, replies: Callable[[], Iterable[ReplyStats]], num_refused: int) -> EngineStatus:
        """Describe the present moment, without waiting for a long step. Raises EngineDead.

        `replies` returns the ones that wait or run; `num_refused` counts requests that were refused by the queue.
        """
        moment = await self._moment()
        return engine_status(moment, replies(), num_refused)

    async def metrics(self) -> Iterator[Metric]:
        """The figures in Prometheus' form. Raises EngineDead."""
        return metric_families(await self._moment())

    async def _moment(self) -> Moment:
        self._thread.check_alive()
        report, age_s = await self._desk.latest()
        return Moment(
            build=self._build,
            facts=self.model_facts,
            memory=self._memory,
            report=report,
            report_age_s=age_s,
            totals=self._totals,
            now=time.monotonic(),
        )


PATIENCE_S = 0.25  # a step may take seconds while a long prompt is prefilled


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


class Watchdog:
    """`step_started_s` returns the start of the running step, or None. `thread_id` returns the thread to inspect."""

    def __init__(
        self, *, limit_s: float, step_started_s: Callable[[], float | None], thread_id: Callable[[], int | None]
    ):
        self._limit_s = limit_s
        self._step_started_s = step_started_s
        self._thread_id = thread_id
        self._logged_s: float | None = None  # start of the step that was logged

    def error(self) -> str | None:
        """Why the engine hangs, or None. The first call during a hanging step logs the stack."""
        started_s = self._step_started_s()
        if started_s is None or time.monotonic() - started_s < self._limit_s:
            return None
        stack = stack_of(self._thread_id())
        if self._logged_s != started_s:
            self._logged_s = started_s
            logger.error("The engine hangs in a step:\n%s", "".join(stack.format()))
        return f"The engine has been in one step for {time.monotonic() - started_s:.0f} s{place_in(stack)}."
