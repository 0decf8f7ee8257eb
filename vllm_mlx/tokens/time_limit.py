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
        # An exception that is on its way comes at this call of a Python function, inside the block. It is not taken
        # back: that marks the thread in CPython 3.11, and a profiler or debugger then hangs in it.
        timer.cancel()
