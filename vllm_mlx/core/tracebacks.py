"""Frees what an exception keeps alive: the local variables of every frame that it passed through."""

import traceback


def clear_locals(error: BaseException) -> None:
    """Free the locals of all finished frames of an exception, its causes and its group. Line numbers stay for the log.

    An exception is often part of a reference cycle (frame, future, exception) that only a full garbage collection
    frees. Until then it would keep everything that its frames refer to.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
