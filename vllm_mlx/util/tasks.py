"""Work whose caller waits for the result: time limits, concurrent tasks, and work on another thread."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakMethod

from ..core.errors import Cancelled, TimeLimit
from .fence import clear_locals

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadline:
    """The time limit of one piece of work, shared by the thread that works and the event loop that waits for it.

    The worker calls `check` between its steps. Any thread may call any method.
    """

    def __init__(self, limit_s: float, message: str, *, clock: Callable[[], float] = time.monotonic):
        """`message` is the error text that the client reads when the time is over: it names the limit and its flag."""
        self._clock = clock
        self._end_s = clock() + limit_s
        self._message = message
        self._is_cancelled = False

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed or the work was cancelled."""
        return 0.0 if self._is_cancelled else max(0.0, self._end_s - self._clock())

    def cancel(self) -> None:
        """End the work at its next check, because its caller has left."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raise TimeLimit when the time is over, also if the work was cancelled; otherwise Cancelled after `cancel`."""
        if self._clock() >= self._end_s:
            raise TimeLimit(self._message)
        if self._is_cancelled:
            raise Cancelled()


def do_nothing(*_: object) -> None:
    """Stand in for a callback that is not set."""


def settle(result: "Future[T]", work: Callable[[*Ts], T], *args: *Ts) -> None:
    """Do the work and put its result or its error into the future, like an executor. Do nothing if it was cancelled."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work(*args))
    except BaseException as error:  # the error belongs to the thread that waits
        result.set_exception(error)


def python_process(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a process that runs a module with the packages of this one.

    The process inherits no other variable of the environment.
    """
    folders = [str(Path(__file__).parents[2]), *(str(Path(folder).absolute()) for folder in sys.path)]
    return [sys.executable, "-S", "-P", "-m", module], {"PYTHONPATH": os.pathsep.join(folders)}


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a running thread as soon as it is between two steps of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def call_at_exit(method: Callable[[], object]) -> None:
    """Call the bound method when the main thread has ended and daemon threads still run, if its object is alive then.

    A daemon thread that is inside of a library when Python ends would make the library abort the process.
    """
    reference = WeakMethod(method)

    def call() -> None:
        try:
            if (alive := reference()) is not None:
                alive()
        except KeyboardInterrupt:  # a second Ctrl-C does not wait for it
            os._exit(128 + signal.SIGINT)

    threading._register_atexit(call)  # type: ignore[attr-defined]  # atexit's own functions are called too late


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the tasks at the same time. The first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
        return [task.result() for task in tasks]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        clear_locals(failed)  # the group, the tasks and the first error would keep each other alive
    try:
        raise first  # outside of `except`, where the group would become its context
    finally:
        del first
