"""Work whose result somebody waits for: several tasks at once, and work on another thread."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from .tracebacks import clear_locals

T = TypeVar("T")


def settle(result: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work and put its result or its error into the future, like an executor. Do nothing if it was cancelled."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except BaseException as error:  # the error belongs to the thread that waits
        result.set_exception(error)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The first that fails ends the others, and is what is raised."""
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
