"""A disk that is full, and a clock that is put back: no token changes, and nothing ends."""

import errno
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.engine.test_disk_any_load import files, started
from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.rows import cases
from tests.support.running import eventually
from vllm_mlx.disk import store, writer
from vllm_mlx.disk.faults import NoRoom
from vllm_mlx.disk.store import PAUSE_S

DAY_S = 24 * 3600
PROMPT = tuple(7 + (5 * place * place + 3 * place) % 180 for place in range(400))
LONGER = (*PROMPT, 3, 5, 8)


class Clock:
    """Time for the tier, which a test moves on."""

    sleep = staticmethod(time.sleep)
    now_s = 1000.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s


def full(called: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    """`os.write` on a disk with few bytes left: the thread that writes records finds it full in the middle of one."""
    num_left = 50_000

    def write(file: int, data: bytes) -> int:
        nonlocal num_left
        if not threading.current_thread().name.startswith("disk-write"):
            return called(file, data)
        if not num_left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_written = called(file, data[:num_left])
        num_left -= num_written
        return num_written

    return write


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_a_full_disk_changes_no_token_and_is_said_once(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(architecture)
    monkeypatch.setattr(store, "time", Clock)
    with started(path, tmp_path) as server, monkeypatch.context() as patching:
        patching.setattr(os, "write", full(os.write))
        for prompt in (PROMPT, LONGER):
            assert server.generate(prompt) == [plain_loop(path, prompt, 6)[0]]
            Clock.now_s += PAUSE_S
            server.disk.write_all(lambda: 10.0)
        patching.undo()
        Clock.now_s += PAUSE_S
        assert server.generate(PROMPT) == [plain_loop(path, PROMPT, 6)[0]]
        assert server.disk.report().off_reason is None
    lines = [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert len(lines) == 1 and "Remove other files, or choose another folder" in lines[0]
    assert files(tmp_path), "it is written once there is room"
    with started(path, tmp_path) as server:
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().hits == 1 and not server.disk.report().num_damaged


def test_a_disk_that_is_full_at_the_start_is_tried_again_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("qwen3")
    with started(path, tmp_path) as server:
        server.generate(PROMPT)

    def connect(*_: object, **__: object) -> sqlite3.Connection:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(store, "time", Clock)
    with ExitStack() as opened:
        with monkeypatch.context() as patching:
            patching.setattr(sqlite3, "connect", connect)
            server = opened.enter_context(started(path, tmp_path))
            assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
            assert server.disk.report().hits == 0 and server.disk.report().off_reason is None
        server.engine.cache_tree.clear()
        Clock.now_s += PAUSE_S
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().hits == 1
    assert len([record for record in caplog.records if "disk is full" in record.getMessage()]) == 1


def test_a_disk_without_room_for_a_row_turns_nothing_off(tmp_path: Path) -> None:
    """As when a clear cannot empty the database's log."""
    path = checkpoint("qwen3")
    with started(path, tmp_path) as server:
        server.disk.store.fail(NoRoom("disk", "Nothing more can be written."))
        assert server.generate(PROMPT) == [plain_loop(path, PROMPT, 6)[0]]
        assert server.disk.report().off_reason is None


def test_a_clock_that_was_put_back_changes_no_token(tmp_path: Path) -> None:
    """The files and the sums of the days come from a time that lies years ahead."""
    path, ahead_s = checkpoint("qwen3"), 3650 * DAY_S
    rng = random.Random(2)
    others = [tuple(rng.randrange(1, 500) for _ in range(300)) for _ in range(3)]
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE record SET used = used + ?", (ahead_s,))
        connection.execute("UPDATE day SET day = day + 3650, bytes = 50000000000")
    cap = 2 * sum(file.stat().st_size for file in files(tmp_path))
    with started(path, tmp_path, cache_disk_bytes=cap) as server:
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().hits == 1
        for prompt in others:
            assert server.generate(prompt) == [plain_loop(path, prompt, 6)[0]]
            server.disk.write_all(lambda: 10.0)
        assert server.disk.report().off_reason is None
    assert sum(file.stat().st_size for file in files(tmp_path)) <= cap
    with started(path, tmp_path, cache_disk_bytes=cap) as server:
        server.generate((*others[-1], 9))
        assert server.disk.report().hits == 1, "what was used last is kept, although older files are from the future"


def test_a_path_is_due_after_a_second_and_after_a_minute_once_half_of_the_day_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")
    monkeypatch.setattr(writer, "time", Clock)
    with started(path, tmp_path / "measured") as server:
        server.generate(PROMPT)
    num_bytes = sum(file.stat().st_size for file in files(tmp_path / "measured"))
    with started(path, tmp_path / "cache", cache_disk_daily_bytes=2 * num_bytes - 1) as server:
        for wait_s, prompt in ((writer.SETTLED_S, PROMPT), (writer.SPARING_S, PROMPT[::-1])):
            server.generate(prompt)
            before = set(files(tmp_path))
            Clock.now_s += wait_s * 0.9
            server.disk.tick(is_idle=True)
            assert not server.disk.writer.is_writing and set(files(tmp_path)) == before
            Clock.now_s += wait_s * 0.2
            server.disk.tick(is_idle=True)
            assert server.disk.writer.is_writing
            eventually(lambda: server.disk.tick(is_idle=True, wait_s=0.01) or not server.disk.writer.is_writing)


def test_a_conversation_is_kept_whole_after_its_folder_was_deleted(tmp_path: Path) -> None:
    """What is written later must not continue records that are gone: the next start could not use it."""
    path, root = checkpoint("qwen3"), tmp_path / "cache"
    with started(path, root) as server:
        for prompt in (PROMPT[:200], PROMPT):
            server.generate(prompt)
            server.disk.write_all(lambda: 10.0)
        shutil.rmtree(root)
        server.generate(LONGER)
        server.disk.write_all(lambda: 10.0)
    with started(path, root) as server:
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().tokens_read == len(LONGER) - 1
