"""Several things at once, all of which are needed."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from .tracebacks import clear_locals

T = TypeVar("T")


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
