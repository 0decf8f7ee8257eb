"""Threads that prepare prompts off the event loop, shared fairly between tenants."""

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from ..core.errors import ShuttingDown
from ..core.messages import Part, ReasoningPart, TextPart, ToolResultPart
from ..core.request import Request
from ..util.fair_queue import FairQueue, Place
from ..util.tasks import Deadline, do_nothing, settle

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_PACKAGE = str(Path(__file__).parents[1])

LONG_CHARS = 1_000_000  # tokenising this many characters takes about a second
MAX_THREADS = 6
TENANT_THREADS = 2
MAX_LONG = 2  # further threads for long prompts, one per tenant: tokenising takes some hundred bytes a character
MAX_HUNG = 8  # from this many hung threads on, `/health` reports an error; until then, a new thread replaces each
HANG_SLACK_S = 10.0  # how much longer than the deadline a single call into a library may take
_WITHOUT_DEADLINE_S = 60.0  # the time after which work without a deadline counts as hung
_LOOK_S = 5.0  # between two looks at whether a hung thread made room


def is_long(request: Request) -> bool:
    texts = () if request.texts is None else request.texts.texts
    num_chars = sum(len(text) for text in (request.prompt, request.suffix, *texts) if isinstance(text, str))
    return num_chars + sum(_num_chars(message.parts) for message in request.messages or ()) >= LONG_CHARS


def _num_chars(parts: Iterable[Part]) -> int:
    count = 0
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart):
            count += len(part.text)
        elif isinstance(part, ToolResultPart):
            count += _num_chars(part.content)
    return count


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[..., Any]
    args: tuple[Any, ...]
    deadline: Deadline | None
    hangs_at_s: float = math.inf  # known once it starts: from then on, by the monotonic clock, it counts as hung
    result: "Future[Any]" = field(default_factory=Future)
    leave: Callable[[], None] = do_nothing  # its place, once it starts
    thread_id: int | None = None
    is_reported: bool = False

    @property
    def is_hung(self) -> bool:
        return time.monotonic() > self.hangs_at_s

    def start(self, place: Place) -> None:
        limit_s = _WITHOUT_DEADLINE_S if self.deadline is None else self.deadline.remaining_s
        self.leave, self.hangs_at_s = place.leave, time.monotonic() + limit_s + HANG_SLACK_S

    def run(self) -> None:
        self.thread_id = threading.get_ident()
        settle(self.result, self._work_in_time)

    def _work_in_time(self) -> Any:
        if self.deadline is not None:
            self.deadline.check()
        return self.work(*self.args)


class PromptPool:
    """Any thread may call it. Tenants take turns, and long prompts do not delay short ones.

    No tenant has all threads, so that the prompts of others need not wait. A thread that hangs is replaced.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_THREADS + MAX_LONG + MAX_HUNG, thread_name_prefix="prompt")
        self._short = FairQueue(MAX_THREADS, per_key=TENANT_THREADS)
        self._long = FairQueue(MAX_LONG, per_key=1)
        self._lock = threading.Lock()
        self._running: list[_Job] = []
        self._changed: Callable[[bool], None] = do_nothing

    def watch(self, changed: Callable[[bool], None]) -> None:
        """Call `changed` with True when the first thread starts to work, and with False when the last one ends."""
        self._changed = changed

    async def run(
        self, work: Callable[[*Ts], T], *args: *Ts, tenant: str, deadline: Deadline | None, is_long: bool = False
    ) -> T:
        """Raise the errors of `work` and of the deadline, and ShuttingDown at shutdown.

        Work that did not begin before that, or before the caller was cancelled, is dropped.
        """
        result: asyncio.Future[T] = asyncio.wrap_future(self._add(work, args, tenant, deadline, is_long))
        try:
            while not result.done():
                rest_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline.remaining_s)
                await asyncio.wait({result}, timeout=rest_s)
                if not result.done():
                    self._hung()
                    if deadline is not None:
                        deadline.check()
            return result.result()
        finally:
            result.cancel()

    def submit(self, work: Callable[[*Ts], T], *args: *Ts, tenant: str = "") -> "Future[T]":
        """Add work for which no request waits. Its failure is logged. Raises ShuttingDown after shutdown."""
        result = self._add(work, args, tenant, None, False)
        result.add_done_callback(_log_failure)
        return result

    def error(self) -> str | None:
        """Return the reason if too many threads hang to prepare prompts; each stack is logged once."""
        hung = self._hung()
        for job in hung:
            if not job.is_reported:
                job.is_reported = True
                logger.error("A thread that prepares a prompt hangs:\n%s", "".join(stack_of(job.thread_id).format()))
        if len(hung) < MAX_HUNG:
            return None
        return f"{len(hung)} threads that prepare prompts hang{place_in(stack_of(hung[0].thread_id))}."

    def shutdown(self) -> None:
        """Work that has not started fails with ShuttingDown."""
        for queue in (self._short, self._long):
            queue.close(ShuttingDown)
        self._threads.shutdown(wait=False)

    def _add(
        self, work: Callable[..., T], args: tuple[Any, ...], tenant: str, deadline: Deadline | None, is_long: bool
    ) -> "Future[T]":
        self._hung()
        job = _Job(work, args, deadline)
        waiting = (self._long if is_long else self._short).ask(tenant)
        job.result.add_done_callback(lambda _: waiting.cancel())  # its caller may leave
        waiting.add_done_callback(partial(self._start, job))
        return job.result

    def _start(self, job: _Job, given: "Future[Place]") -> None:
        if given.cancelled():
            return
        if given.exception() is not None:
            settle(job.result, given.result)
            return
        job.start(given.result())
        with self._lock:
            self._running.append(job)
            if len(self._running) == 1:
                self._changed(True)
        try:
            self._threads.submit(self._run, job)
        except RuntimeError:  # the shutdown came in between
            job.work, job.args = _refuse, ()
            self._run(job)

    def _hung(self) -> list[_Job]:
        """Return the jobs that hang, and give their places to others."""
        hung = [job for job in list(self._running) if job.is_hung]
        for job in hung:
            job.leave()
        return hung

    def _run(self, job: _Job) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._running.remove(job)
                if not self._running:
                    self._changed(False)
            job.leave()


def _log_failure(done: "Future[Any]") -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, ShuttingDown):
        logger.error("Background work has failed", exc_info=error)


def _refuse() -> None:
    raise ShuttingDown()


def stack_of(thread_id: int | None) -> traceback.StackSummary:
    """Return the stack of a thread; empty if there is no such thread."""
    frame = sys._current_frames().get(thread_id or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def place_in(stack: traceback.StackSummary) -> str:
    """Return the innermost frame of our own code, as the end of a sentence; empty for an empty stack."""
    own = [frame for frame in stack if frame.filename.startswith(_PACKAGE)] or list(stack)
    return f", in {own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
