"""Figures of macOS, read from recorded output through fakes of its calls, and the program that keeps a Mac awake."""

import asyncio
import ctypes
import logging
import os
import struct
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from vllm_mlx.core.memory import NO_OVERRUN, UNKNOWN_SYSTEM, Pressure, SystemMemory
from vllm_mlx.engine.macos import (
    KeepAwake,
    LibSystem,
    SystemWatch,
    is_on_battery,
    parse_wired_bytes,
    return_freed_memory,
)
from vllm_mlx.runner.device import DeviceWatch

# struct rusage_info_v0 of a process on an M1: a uuid, then the ten counters of sys/resource.h.
RUSAGE = struct.pack("=16s10Q", bytes(16), 90_125, 40_811, 12, 3, 7, 0, 512_901_120, 734_003_200, 81_233, 0)
GB = 1 << 30
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5122.
Pages active:                            410233.
Pages inactive:                          401220.
Pages speculative:                         7431.
Pages throttled:                              0.
Pages wired down:                        140321.
Pages purgeable:                           1833.
"""


class FakeLibrary:
    """libSystem with recorded output."""

    def __init__(self, level: int = 1):
        self.level = level

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
        if (pid, flavor) != (os.getpid(), 0):
            return -1
        buffer.raw = RUSAGE
        return 0

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: int) -> int:
        if name != b"kern.memorystatus_vm_pressure_level":
            return -1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.level
        return 0


@pytest.mark.parametrize(
    ("level", "pressure"), [(1, Pressure.NORMAL), (2, Pressure.WARNING), (4, Pressure.CRITICAL), (9, Pressure.NORMAL)]
)
def test_recorded_figures_are_read(level: int, pressure: Pressure) -> None:
    assert SystemWatch(LibSystem(FakeLibrary(level)))() == SystemMemory(footprint_bytes=734_003_200, pressure=pressure)


def test_the_system_is_asked_at_most_every_quarter_of_a_second() -> None:
    now, library = 0.0, FakeLibrary()
    watch = SystemWatch(LibSystem(library), clock=lambda: now)
    first = watch()
    library.level, now = 4, 0.2
    assert watch() is first
    now = 0.25
    assert watch().pressure is Pressure.CRITICAL


def test_a_missing_call_costs_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    watch = SystemWatch(LibSystem(object()), clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        assert watch() == UNKNOWN_SYSTEM
        now = 1.0
        assert watch() == UNKNOWN_SYSTEM
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The system does not report the process's memory",
        "The system does not report the memory pressure",
    ]


def test_other_systems_are_not_asked() -> None:
    assert SystemWatch(None)() is UNKNOWN_SYSTEM


def test_wired_memory_is_read_from_vm_stat() -> None:
    assert parse_wired_bytes(VM_STAT) == 140_321 * 16_384
    with pytest.raises(ValueError, match="wired"):
        parse_wired_bytes("Mach Virtual Memory Statistics: (page size of 16384 bytes)\n")


def test_a_footprint_above_the_limit_is_an_overrun() -> None:
    system = SystemMemory(footprint_bytes=1 << 50, pressure=Pressure.WARNING)
    overrun = DeviceWatch(1 << 60, 1 << 49, lambda: system).overrun()
    assert (1 << 49) - (4 << 30) < overrun.kept_bytes <= 1 << 49, "less the freed buffers that MLX keeps"
    assert overrun.kept_bytes == overrun.peak_bytes
    assert overrun.pressure is Pressure.WARNING


def test_a_footprint_counts_once_and_without_the_buffers_that_mlx_kept_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_bytes, sample = 2 * GB, SystemMemory(footprint_bytes=11 * GB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: cache_bytes)
    watch = DeviceWatch(1 << 60, 10 * GB, lambda: sample)
    assert watch.overrun() == NO_OVERRUN
    cache_bytes = 0  # MLX gave them back after the sample
    assert watch.overrun() == NO_OVERRUN
    sample = SystemMemory(footprint_bytes=11 * GB)
    assert watch.usage().system is sample
    assert watch.overrun().kept_bytes == GB
    assert watch.overrun() == NO_OVERRUN, "what the overrun made room for is not in the sample yet"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stand-in for `caffeinate` that runs until it is ended."""
    path = tmp_path / "caffeinate"
    path.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/started\nexec sleep 60\n")
    path.chmod(0o755)
    return path


def test_the_machine_is_kept_awake_while_requests_run(program: Path) -> None:
    async def run() -> None:
        awake = KeepAwake(enabled=True, program=str(program), linger_s=0.05)
        awake.hold()
        awake.hold()
        awake.release()
        awake.hold()
        await asyncio.sleep(0.2)
        assert awake.is_awake, "a request came within the linger time"
        while not (program.parent / "started").exists():  # the program may start late
            await asyncio.sleep(0.01)
        awake.release()
        await asyncio.sleep(0.2)
        assert not awake.is_awake
        awake.hold()
        awake.close()
        assert not awake.is_awake

    asyncio.run(run())
    started = (program.parent / "started").read_text().splitlines()
    assert set(started) <= {f"-i -w {os.getpid()}"} and 1 <= len(started) <= 2


def test_a_program_that_ignores_signals_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    path, ready = tmp_path / "caffeinate", tmp_path / "ready"
    path.write_text(f"#!/bin/sh\ntrap '' TERM\ntouch {ready}\nwhile true; do sleep 0.1; done\n")
    path.chmod(0o755)
    awake = KeepAwake(enabled=True, program=str(path))
    awake.hold()
    while not ready.exists():
        time.sleep(0.01)
    awake.close()
    assert not awake.is_awake


@pytest.mark.parametrize("enabled", [True, False])
def test_without_the_program_nothing_is_started(tmp_path: Path, program: Path, enabled: bool) -> None:
    awake = KeepAwake(enabled=enabled, program=str(tmp_path / "missing" if enabled else program))
    awake.hold()
    assert not awake.is_awake
    awake.close()


class FakeAllocator:
    """The calls of macOS' allocator that return freed memory."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, int]] = []

    def malloc_zone_pressure_relief(self, zone: ctypes.c_void_p, goal: ctypes.c_size_t) -> int:
        self.asked.append((zone.value, goal.value))
        return 1 << 20


def test_macos_is_asked_for_freed_memory_of_all_zones() -> None:
    library = FakeAllocator()
    return_freed_memory(library)
    assert library.asked == [(None, 0)]


def test_an_allocator_without_such_a_call_keeps_its_memory() -> None:
    return_freed_memory(object())


class PowerSource:
    """IOKit, as far as it tells the time that is left on the battery."""

    def __init__(self, left_s: float):
        self.IOPSGetTimeRemainingEstimate = lambda: left_s


def no_library(path: str) -> None:
    raise OSError(path)


def test_the_power_source_is_known_from_the_time_that_is_left() -> None:
    for left_s, is_empty in ((-2.0, False), (-1.0, True), (3600.0, True)):
        assert is_on_battery(load=lambda path, left_s=left_s: PowerSource(left_s)) == is_empty
    assert not is_on_battery(load=no_library) and not is_on_battery(load=lambda path: object())
