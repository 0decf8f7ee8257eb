"""Ends Python code that runs too long, on whichever thread it runs. A single long call into C is not interrupted."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class OutOfTime(Exception):
    pass


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside the block once it has run for `seconds`."""
    thread_id = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_over = False

    def fire() -> None:
        with lock:
            if not is_over:
                _raise_in(thread_id, ctypes.py_object(OutOfTime))

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
        _raise_in(thread_id, None)  # one that is on its way would end whatever comes next
