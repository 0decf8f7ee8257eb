"""Threads that prepare prompts, shared fairly between tenants. Knows no request."""

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import Overloaded
from ..core.tasks import Deadline, settle

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])

MAX_THREADS = 8
TENANT_THREADS = 2  # per tenant; one of them takes long prompts, so that short ones do not wait
MAX_LONG = 2  # long prompts of all tenants at once, since tokenising takes some hundred bytes for each character
HANG_SLACK_S = 10.0  # a single call into a library may outlast the deadline by so much
_WITHOUT_DEADLINE_S = 60.0  # from the start of work that nobody waits for; it counts as hung afterwards
_LOOK_S = 5.0  # between two looks at whether a hung thread made room
_RETRY_S = 5.0  # time after which a client may retry if the pool is shut down


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    tenant: str
    is_long: bool
    deadline: Deadline | None
    hangs_at_s: float = math.inf  # known once it starts: from then on, by the monotonic clock, it counts as hung
    result: "Future[Any]" = field(default_factory=Future)
    thread_id: int | None = None
    is_reported: bool = False

    @property
    def is_hung(self) -> bool:
        return time.monotonic() > self.hangs_at_s

    def start_clock(self) -> None:
        limit_s = _WITHOUT_DEADLINE_S if self.deadline is None else self.deadline.remaining_s
        self.hangs_at_s = time.monotonic() + limit_s + HANG_SLACK_S

    def run(self) -> None:
        self.thread_id = threading.get_ident()
        settle(self.result, self._work_in_time)

    def _work_in_time(self) -> Any:
        if self.deadline is not None:
            self.deadline.check()
        return self.work()


class PromptPool:
    """Any thread may call it. Work of one tenant starts in order of arrival; long prompts do not delay short ones.

    Tenants take turns. Each has threads of its own as long as there are any left, so that nobody waits behind
    another's prompts. A thread that hangs is replaced.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="prompt")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # the next tenant first
        self._running: list[_Job] = []
        self._is_shut_down = False

    async def run(self, work: Callable[[], T], *, tenant: str, deadline: Deadline | None, is_long: bool = False) -> T:
        """Raises what `work` raises, what the deadline raises, which counts from now on, and Overloaded at shutdown.

        Work that did not begin before that, or before the caller was cancelled, is dropped.
        """
        job = self._add(work, tenant, deadline, is_long)
        result: asyncio.Future[T] = asyncio.wrap_future(job.result)
        try:
            while not result.done():
                rest_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline.remaining_s)
                await asyncio.wait({result}, timeout=rest_s)
                if not result.done():
                    self._start_waiting()
                    if deadline is not None:
                        deadline.check()
            return result.result()
        finally:
            result.cancel()
            self._drop(job)

    def submit(self, function: Callable[..., T], *args: Any, tenant: str = "") -> "Future[T]":
        """Add work for which no request waits. Raises Overloaded after shutdown."""
        return self._add(partial(function, *args), tenant, None, False).result

    def error(self) -> str | None:
        """Why no prompt can be prepared: all threads hang. The stack of each that hangs is logged once."""
        hung = [job for job in list(self._running) if job.is_hung]
        for job in hung:
            if not job.is_reported:
                job.is_reported = True
                logger.error("A thread that prepares a prompt hangs:\n%s", "".join(stack_of(job.thread_id).format()))
        if len(hung) < MAX_THREADS:
            return None
        return f"All {MAX_THREADS} threads that prepare prompts hang{place_in(stack_of(hung[0].thread_id))}."

    def shutdown(self) -> None:
        """Work that has not started fails with Overloaded."""
        with self._lock:
            self._is_shut_down = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in waiting:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(_shut_down())
        self._threads.shutdown(wait=False)

    def _add(self, work: Callable[[], Any], tenant: str, deadline: Deadline | None, is_long: bool) -> _Job:
        job = _Job(work, tenant, is_long, deadline)
        with self._lock:
            if self._is_shut_down:
                raise _shut_down()
            self._waiting.setdefault(tenant, deque()).append(job)
        self._start_waiting()
        return job

    def _drop(self, job: _Job) -> None:
        with self._lock:
            jobs = self._waiting.get(job.tenant)
            if jobs is not None and job in jobs:
                self._take(job)

    def _start_waiting(self) -> None:
        with self._lock:
            while len(self._running) < MAX_THREADS and (job := self._next()) is not None:
                self._take(job)
                job.start_clock()
                self._running.append(job)
                self._threads.submit(self._run, job)

    def _next(self) -> _Job | None:
        """The first job that may start, found without a look at the jobs of tenants whose threads are all in use."""
        working = [job for job in self._running if not job.is_hung]
        takes_long = sum(job.is_long for job in working) < MAX_LONG
        for tenant, jobs in self._waiting.items():
            own = [job for job in working if job.tenant == tenant]
            if len(own) >= TENANT_THREADS:
                continue
            may_be_long = takes_long and not any(job.is_long for job in own)
            for job in jobs:
                if may_be_long or not job.is_long:
                    return job
        return None

    def _take(self, job: _Job) -> None:
        """Remove a job that waits. Its tenant's next turn comes after those of all others."""
        jobs = self._waiting[job.tenant]
        jobs.remove(job)
        self._waiting.move_to_end(job.tenant)
        if not jobs:
            del self._waiting[job.tenant]

    def _run(self, job: _Job) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._running.remove(job)
            self._start_waiting()


def _shut_down() -> Overloaded:
    return Overloaded("The server is shutting down.", retry_after_s=_RETRY_S)


def stack_of(thread_id: int | None) -> traceback.StackSummary:
    """The stack of a thread; empty if there is no such thread."""
    frame = sys._current_frames().get(thread_id or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def place_in(stack: traceback.StackSummary) -> str:
    """The innermost frame of our own code, as the end of a sentence; empty for an empty stack."""
    own = [frame for frame in stack if frame.filename.startswith(_PACKAGE)] or list(stack)
    return f", in {own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
