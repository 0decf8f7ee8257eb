"""The inside of a process that reads one file: the file on standard input, frames of its contents on standard output.

The libraries that read it are native code: one call may take any time and memory, and cannot be interrupted. A thread
of this process watches both, and ends the process. It can, because they run without the interpreter's lock.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FRAME = struct.Struct(">cI")  # the header of a frame: its kind, and the length of its contents
REFUSED, END = b"r", b"e"  # kinds that every process sends
TOO_SLOW, TOO_LARGE = 3, 4  # exit statuses
_WATCH_S = 0.01
_RUSAGE_FORMAT, _FOOTPRINT_FIELD = "=16s10Q", 8  # struct rusage_info_v0 of macOS, and ri_phys_footprint in it


class Refused(Exception):
    """The file cannot be read. Its text is the reason, as the server understands it."""


def serve(read: Callable[[bytes], Iterator[tuple[bytes, bytes]]], max_s: float, max_memory_bytes: int) -> None:
    """Send the frames of `read` and end the process. `max_s`: limit of computing time."""
    os.nice(10)  # the replies of the server come first if all cores are busy
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the server ends this one
    threading.Thread(target=_watch, args=(max_s, max_memory_bytes), daemon=True).start()
    data = sys.stdin.buffer.read()
    try:
        for kind, payload in read(data):
            _send(kind, payload)
        _send(END, b"")
    except Refused as error:
        _send(REFUSED, str(error).encode())
    os._exit(0)  # without the libraries' own cleanup, which may crash on a broken file


def _send(kind: bytes, payload: bytes) -> None:
    sys.stdout.buffer.write(FRAME.pack(kind, len(payload)) + payload)
    sys.stdout.buffer.flush()


def _watch(max_s: float, max_memory_bytes: int) -> None:
    resident_bytes = _memory_of_this_process()
    while True:
        if time.process_time() > max_s:
            os._exit(TOO_SLOW)
        if resident_bytes() > max_memory_bytes:
            os._exit(TOO_LARGE)
        time.sleep(_WATCH_S)


def _memory_of_this_process() -> Callable[[], int]:
    """Return a function that says how many bytes this process takes now, as the system counts them."""
    if sys.platform == "darwin":
        call = ctypes.CDLL(None).proc_pid_rusage
        buffer = ctypes.create_string_buffer(struct.calcsize(_RUSAGE_FORMAT))

        def footprint() -> int:
            call(os.getpid(), 0, buffer)
            return int(struct.unpack(_RUSAGE_FORMAT, buffer.raw)[_FOOTPRINT_FIELD])

        return footprint
    statm = Path("/proc/self/statm")  # not the peak, which a process inherits from the one that started it
    return lambda: int(statm.read_bytes().split()[1]) * resource.getpagesize()
