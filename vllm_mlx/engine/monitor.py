"""Answers what operators ask: whether the engine is well, what it does now, and what it has done."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric

from ..core.config import EngineConfig
from ..core.step import SequenceUpdate
from ..prompt.processor import RequestProcessor
from .engine import Engine
from .monitoring.counters import ReplyStats, Totals
from .monitoring.facts import build_facts, model_facts
from .monitoring.prometheus import metric_families
from .monitoring.report import ReportDesk
from .monitoring.schema import EngineStatus
from .monitoring.status import Moment, engine_status
from .monitoring.watchdog import Watchdog
from .prompt_pool import PromptPool
from .thread import EngineThread


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
