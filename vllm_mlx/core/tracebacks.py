"""What an exception keeps alive: the local variables of every frame that it came through."""

import traceback


def clear_locals(error: BaseException) -> None:
    """Free the locals of all finished frames of an exception, its causes and its group. Lines stay for the log.

    An exception often lies in a cycle (frame, future, exception), which only a full garbage collection ends: until
    then, it would keep what its frames held.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions
