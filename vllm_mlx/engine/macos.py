"""Memory that the system reports and takes back, and the program that keeps a Mac awake.

Most figures are those of macOS. A call that this macOS does not have is logged once; the server continues without its
figure.
"""

import asyncio
import ctypes
import logging
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..core.memory import UNKNOWN_SYSTEM, Pressure, SystemMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SAMPLE_S = 0.25  # the system is asked at most this often; one sample takes some microseconds
_RUSAGE_INFO_V0 = 0
_RUSAGE_FORMAT = "=16s10Q"  # struct rusage_info_v0 of sys/resource.h: a uuid and ten counters
_FOOTPRINT_FIELD = 8  # ri_phys_footprint
_PRESSURE_LEVELS = {1: Pressure.NORMAL, 2: Pressure.WARNING, 4: Pressure.CRITICAL}  # the levels of sys/event.h
_VM_STAT = re.compile(r"page size of (\d+) bytes.*^Pages wired down:\s+(\d+)\.", re.DOTALL | re.MULTILINE)
_CAFFEINATE = "/usr/bin/caffeinate"
_IOKIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
_EXTERNAL_POWER = -2.0
_LINGER_S = 30.0  # the next turn of an agent mostly comes within this time


class LibSystem:
    """Memory figures from macOS' libSystem, the loaded `library`. A call that it does not have raises OSError."""

    def __init__(self, library: Any):
        self._library = library

    def footprint_bytes(self) -> int:
        """Return the memory that the system charges to this process, as Activity Monitor displays it."""
        buffer = ctypes.create_string_buffer(struct.calcsize(_RUSAGE_FORMAT))
        if self._call("proc_pid_rusage", os.getpid(), _RUSAGE_INFO_V0, buffer) != 0:
            raise OSError("proc_pid_rusage failed")
        return int(struct.unpack(_RUSAGE_FORMAT, buffer.raw)[_FOOTPRINT_FIELD])

    def pressure(self) -> Pressure:
        """Return the memory pressure of the machine, as the kernel grades it."""
        level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        name = b"kern.memorystatus_vm_pressure_level"
        if self._call("sysctlbyname", name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            raise OSError("kern.memorystatus_vm_pressure_level cannot be read")
        return _PRESSURE_LEVELS.get(level.value, Pressure.NORMAL)

    def _call(self, name: str, *arguments: Any) -> int:
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError as error:
            raise OSError(f"{name} does not exist") from error


def return_freed_memory(library: Any) -> None:
    """Make the C allocator of the loaded `library` return freed memory to the system, if it has a call for that."""
    if hasattr(library, "malloc_trim"):  # of glibc
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # of macOS: of all zones, as much as possible
        library.malloc_zone_pressure_relief(ctypes.c_void_p(None), ctypes.c_size_t(0))


def resident_bytes() -> int | None:
    """Return the memory of this process as Linux counts it; None on other systems."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def memory_calls() -> LibSystem | None:
    """Return the calls of this machine; None if it does not run macOS."""
    return LibSystem(ctypes.CDLL(None)) if sys.platform == "darwin" else None


class SystemWatch:
    """Samples the system's figures, at most every quarter of a second. Belongs to the engine thread."""

    def __init__(self, calls: LibSystem | None, clock: Callable[[], float] = time.monotonic):
        self._calls = calls
        self._clock = clock
        self._sampled_s = float("-inf")
        self._sample = UNKNOWN_SYSTEM
        self._missing: set[str] = set()

    def __call__(self) -> SystemMemory:
        if self._calls is not None and (now := self._clock()) >= self._sampled_s + _SAMPLE_S:
            self._sampled_s = now
            self._sample = SystemMemory(
                footprint_bytes=self._ask("process's memory", self._calls.footprint_bytes),
                pressure=self._ask("memory pressure", self._calls.pressure),
            )
        return self._sample

    def _ask(self, figure: str, call: Callable[[], T]) -> T | None:
        if figure in self._missing:
            return None
        try:
            return call()
        except OSError as error:
            self._missing.add(figure)
            logger.warning("The system does not report the %s, so it is not watched: %s", figure, error)
            return None


def is_on_battery(load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Return whether the Mac runs on its battery. It does not where macOS has no such call, as on another system.

    `load` opens a library. `IOPSGetTimeRemainingEstimate` of IOKit gives -2 for external power (IOPowerSources.h).
    """
    if sys.platform != "darwin" and load is ctypes.CDLL:
        return False
    try:
        estimate = load(_IOKIT).IOPSGetTimeRemainingEstimate
    except (OSError, AttributeError):
        return False
    estimate.restype = ctypes.c_double
    return bool(estimate() != _EXTERNAL_POWER)


def wired_bytes(run: Callable[..., str] = subprocess.check_output) -> int | None:
    """Memory of the whole machine that cannot be paged out; None if it is unknown."""
    if sys.platform != "darwin":
        return None
    try:
        return parse_wired_bytes(run(["/usr/bin/vm_stat"], text=True, timeout=5))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("The wired memory could not be read: %s", error)
        return None


def parse_wired_bytes(vm_stat: str) -> int:
    """Return bytes from the output of `vm_stat`. Raises ValueError if it does not have them."""
    if (found := _VM_STAT.search(vm_stat)) is None:
        raise ValueError("vm_stat does not report wired pages")
    return int(found[1]) * int(found[2])


class KeepAwake:
    """Runs `caffeinate` while requests run, so that a Mac does not fall asleep in the middle of a reply.

    Belongs to one event loop. The program also ends with this process (`-w`).
    """

    def __init__(self, *, enabled: bool, program: str = _CAFFEINATE, linger_s: float = _LINGER_S):
        self._command = [program, "-i", "-w", str(os.getpid())] if enabled and Path(program).exists() else None
        self._linger_s = linger_s
        self._child: subprocess.Popen[bytes] | None = None
        self._ending: asyncio.TimerHandle | None = None

    @property
    def is_awake(self) -> bool:
        """Return whether the program runs."""
        return self._child is not None

    def hold(self) -> None:
        """Keep the machine awake from now on."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._command is None or (self._child is not None and self._child.poll() is None):
            return
        try:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                close_fds=False,  # so that Python need not fork this process and its memory; no file is inheritable
            )
        except OSError as error:
            logger.warning("The Mac may fall asleep while replies run: %s", error)
            self._command = None

    def release(self) -> None:
        """Let the machine sleep again, unless `hold` is called within the linger time."""
        if self._child is not None and self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(self._linger_s, self.close)

    def close(self) -> None:
        """End the program immediately."""
        if self._ending is not None:
            self._ending.cancel()
        child, self._child, self._ending = self._child, None, None
        if child is not None:
            child.kill()  # it has nothing to tidy up, and the event loop waits for it
            child.wait()
