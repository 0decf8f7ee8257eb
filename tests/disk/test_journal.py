"""Journals: what they keep over restarts, damage, limits and beside other servers."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.disk import journal as journal_module
from vllm_mlx.disk.frames import frames
from vllm_mlx.disk.journal import Journal, Journals, Restored

from .test_replay import CHANGES, Model


@contextmanager
def journals(folder: Path, **options: Any) -> Iterator[Journals]:
    opened = Journals(folder, **options)
    try:
        yield opened
    finally:
        opened.close()


def restored(journal: Journal) -> Restored:
    found: list[Restored] = []
    journal.restore(found.append)
    journal.wait()
    return found[0]


def kept(folder: Path, kind: str = "notes", **options: Any) -> dict[str, Any]:
    """What the next server finds."""
    with journals(folder, **options) as opened:
        return {value.name: value.value() for value in restored(opened.open(kind)).values}


def put(journal: Journal, name: str, value: Any, salt: str = "", base: str | None = None) -> None:
    journal.put(name, salt, lambda: value, num_bytes=len(str(value)), base=base)


def apply(journal: Journal, change: tuple[Any, ...]) -> None:
    match change:
        case ["put", name, salt, base, value]:
            put(journal, name, value, salt, base)
        case ["drop", names]:
            journal.drop(names)
        case ["use", names]:
            journal.use(names)
        case ["clear", salts]:
            journal.clear(salts)


def state(found: Restored) -> tuple[Any, Any]:
    return [(value.name, value.salt, value.base, value.value()) for value in found.values], found.order


def model_of(changes: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    model = Model()
    for change in changes:
        model.apply(change)
    return model.values, model.order


def file_of(folder: Path, kind: str = "notes") -> Path:
    return folder / f"{kind}.v1.journal"


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CHANGES, min_size=1, max_size=3), st.booleans())
def test_a_restart_finds_what_was_kept(
    tmp_path_factory: pytest.TempPathFactory, lives: list[list[tuple[Any, ...]]], flushes: bool
) -> None:
    """Whatever was changed in several lives, and in however many writes."""
    folder = tmp_path_factory.mktemp("journals")
    done: list[tuple[Any, ...]] = []
    for changes in lives:
        with journals(folder) as opened:
            journal = opened.open("notes")
            assert state(restored(journal)) == model_of(done)
            for change in changes:
                apply(journal, change)
                if flushes:
                    assert opened.flush()
        done += changes
    with journals(folder) as opened:
        assert state(restored(opened.open("notes"))) == model_of(done)


def test_a_cut_or_damaged_byte_costs_the_record_that_it_hits(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        for number in range(5):
            put(journal, str(number), {"text": f"value {number} é🙂"})
    whole = file_of(tmp_path).read_bytes()
    places = [(frame.start, frame.end) for frame in frames(whole, journal._file._identity)]
    assert len(places) == 5
    for end in range(len(whole)):
        file_of(tmp_path).write_bytes(whole[:end])
        assert list(kept(tmp_path)) == [str(number) for number in range(5) if places[number][1] <= end]
    for place in range(0, len(whole), 3):
        file_of(tmp_path).write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        hit = [number for number, (start, end) in enumerate(places) if start <= place < end]
        assert list(kept(tmp_path)) == [str(number) for number in range(5) if number not in hit]


def test_what_follows_a_cut_is_kept_again(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", 1)
    with file_of(tmp_path).open("ab") as file:
        file.write(file_of(tmp_path).read_bytes()[:-3])  # killed in the middle of a write
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "b", 2)
    assert kept(tmp_path) == {"a": 1, "b": 2}


def test_a_killed_process_loses_only_what_was_not_written(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from vllm_mlx.disk.journal import Journals
opened = Journals(Path({str(tmp_path)!r}))
journal = opened.open("notes")
for number in range(200):
    journal.put(str(number), "", lambda: number, num_bytes=1)
    if number == 100:
        assert opened.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    found = list(kept(tmp_path))
    assert len(found) >= 101 and found == [str(number) for number in range(len(found))]


def test_servers_on_one_folder_append_to_one_file(tmp_path: Path) -> None:
    """Even while one of them puts a compacted file in the place of the other's."""
    with journals(tmp_path) as one, journals(tmp_path) as two:
        mine, other = one.open("notes"), two.open("notes")
        for number in range(40):
            put(mine, f"mine {number}", "x" * 40_000)
            mine.drop([f"mine {number - 1}"])
            put(other, f"other {number}", number)
            assert one.flush() and two.flush()
        assert file_of(tmp_path).stat().st_size < 1 << 20, "it was compacted"
    assert kept(tmp_path) == {"mine 39": "x" * 40_000, **{f"other {number}": number for number in range(40)}}


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from vllm_mlx.disk.journal import Journals
opened = Journals(Path(sys.argv[1]))
journal = opened.open("notes")
for number in range(150):
    journal.put(f"{sys.argv[2]} {number}", "", lambda: "x" * 20_000, num_bytes=1)
    journal.drop([f"{sys.argv[2]} {number - 3}"])
    assert opened.flush(60)
opened.close(60)
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("a", "b")]
    assert [process.wait(120) for process in running] == [0, 0]
    assert set(kept(tmp_path)) == {f"{name} {number}" for name in ("a", "b") for number in (147, 148, 149)}


def test_clearing_a_salt_leaves_no_trace_of_it(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        for name, salt in (("a", "one/"), ("b", "one/more"), ("c", "two/"), ("d", "")):
            put(journal, name, f"secret of {name}", salt)
        assert opened.flush()
        journal.clear("one/")
        assert opened.flush()
        assert [name in journal for name in "abcd"] == [False, False, True, True]
        content = file_of(tmp_path).read_bytes()
        assert b"secret of a" not in content and b"secret of b" not in content and b"secret of c" in content
        put(journal, "a", "new", "one/")
    assert kept(tmp_path) == {"c": "secret of c", "d": "secret of d", "a": "new"}


def test_clearing_reaches_the_journals_of_other_checkpoints(tmp_path: Path) -> None:
    for fingerprint in ("f1", "f2"):
        with journals(tmp_path) as opened:
            for kind in ("notes", "letters", "bills"):
                journal = opened.open(kind, fingerprint)
                put(journal, "a", "of one", "one/")
                put(journal, "b", "of two", "two/")
    with journals(tmp_path) as opened:
        mine = opened.open("notes", "f2")
        restored(mine)
        opened.clear("one/", {"notes", "letters"})
        assert opened.flush() and "a" not in mine and "b" in mine
    with_one = sorted(file.name for file in tmp_path.iterdir() if b"of one" in file.read_bytes())
    assert with_one == ["bills-f1.v1.journal", "bills-f2.v1.journal"]
    assert all(b"of two" in file.read_bytes() for file in tmp_path.iterdir())


def test_a_full_journal_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    with journals(tmp_path, max_bytes=100_000) as opened:
        journal = opened.open("notes")
        put(journal, "base", "x")
        for number in range(60):
            put(journal, str(number), "x" * 5_000, base="base")
            if number % 10 == 0:
                assert opened.flush() and file_of(tmp_path).stat().st_size <= 100_000
        put(journal, "too large", "x" * 30_000)
        assert opened.flush()
        assert "base" in journal and "too large" not in journal and "0" not in journal
    found = list(kept(tmp_path, max_bytes=100_000))
    assert found[0] == "base" and found[1:] == [str(number) for number in range(60 - len(found) + 1, 60)]
    assert len(found) > 10


def test_dropped_values_leave_the_file(tmp_path: Path) -> None:
    written: list[int] = []
    with journals(tmp_path, charge=lambda num_bytes: not written.append(num_bytes)) as opened:
        journal = opened.open("notes")
        for number in range(100):
            put(journal, str(number), "x" * 50_000)
            journal.drop([str(number - 2)])
            assert opened.flush()
            assert file_of(tmp_path).stat().st_size < 600_000
    assert sum(written) < 2.5 * 100 * 50_000, "compacting costs no more than writing"
    assert list(kept(tmp_path)) == ["98", "99"]
    assert file_of(tmp_path).stat().st_size < 101_000, "it is compacted at a start"


def test_nothing_is_written_while_the_daily_budget_is_spent(tmp_path: Path) -> None:
    allowed = threading.Event()
    opened = Journals(tmp_path, charge=lambda num_bytes: allowed.is_set())
    journal = opened.open("notes")
    put(journal, "a", 1)
    put(journal, "b", 2)
    assert not opened.flush() and not file_of(tmp_path).exists() and "a" in journal
    allowed.set()
    journal.drop(["a"])
    assert opened.flush()
    opened.close()
    assert kept(tmp_path) == {"b": 2}


def test_what_is_cleared_goes_even_then(tmp_path: Path) -> None:
    budget = [500]

    def charge(num_bytes: int) -> bool:
        budget[0] -= num_bytes
        return budget[0] >= 0

    with journals(tmp_path, charge=charge) as opened:
        journal = opened.open("notes")
        put(journal, "a", "secret", "one")
        put(journal, "b", "x" * 200)
        assert opened.flush()
        put(journal, "c", "x" * 1000)
        assert not opened.flush()
        journal.clear("one")
        assert not opened.flush()
        assert b"secret" not in file_of(tmp_path).read_bytes() and b"xxx" in file_of(tmp_path).read_bytes()


def test_memory_for_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING_BYTES", 1000)
    with journals(tmp_path, charge=lambda num_bytes: False) as opened:
        journal = opened.open("notes")
        journal.put("large", "", lambda: 1, num_bytes=5000)
        journal.put("more", "", lambda: 1, num_bytes=1)
        assert "large" in journal and "more" not in journal


def failures(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.levelno == logging.WARNING for record in caplog.records)


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    with journals(tmp_path / "file" / "journals") as opened:
        journal = opened.open("notes")
        assert restored(journal).values == []
        for number in range(3):
            put(journal, str(number), number)
            assert not opened.flush()
        assert failures(caplog) == 1
        (tmp_path / "file").unlink()
        assert opened.flush()
    assert kept(tmp_path / "file" / "journals") == {"0": 0, "1": 1, "2": 2}


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 100:
            return write(file, data)
        write(file, bytes(data[:50]))
        raise OSError(28, "No space left on device")

    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        put(journal, "a", 1)
        assert opened.flush()
        before = file_of(tmp_path).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            put(journal, "b", "x" * 1000)
            assert not opened.flush()
        assert file_of(tmp_path).read_bytes() == before
    assert kept(tmp_path) == {"a": 1, "b": "x" * 1000}, "it was tried again at the end"


def test_a_removed_folder_begins_anew(tmp_path: Path) -> None:
    with journals(tmp_path / "journals") as opened:
        journal = opened.open("notes")
        put(journal, "a", 1)
        assert opened.flush()
        file_of(tmp_path / "journals").unlink()
        (tmp_path / "journals").rmdir()
        put(journal, "b", 2, base="a")
        assert opened.flush()
        assert "a" not in journal and "b" in journal
    assert kept(tmp_path / "journals") == {"b": 2}


def test_a_value_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    def fails() -> Any:
        raise ValueError("no value")

    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        put(journal, "a", 1)
        journal.put("b", "", fails, num_bytes=1)
        journal.put("c", "", lambda: object(), num_bytes=1)
        put(journal, "d", 2)
        assert opened.flush()
        assert [name in journal for name in "abcd"] == [True, False, False, True]
    assert kept(tmp_path) == {"a": 1, "d": 2}


def test_files_are_the_users_alone_and_bear_their_version(tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    with journals(folder) as opened:
        put(opened.open("notes", "a1b2"), "a", 1)
    [file] = folder.iterdir()
    assert file.name == "notes-a1b2.v1.journal"
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)


def test_other_versions_kinds_and_checkpoints_are_left_alone(tmp_path: Path) -> None:
    strange = {"notes.v2.journal": b"of tomorrow", "notes.txt": b"of somebody"}
    for name, content in strange.items():
        (tmp_path / name).write_bytes(content)
    with journals(tmp_path) as opened:
        put(opened.open("notes", "a1"), "a", 1)
    file_of(tmp_path, "notes-b2").write_bytes(file_of(tmp_path, "notes-a1").read_bytes())
    with journals(tmp_path) as opened:
        assert restored(opened.open("notes")).values == []
        assert restored(opened.open("notes", "b2")).values == [], "a copy is not the file of another checkpoint"
        assert [value.name for value in restored(opened.open("notes", "a1")).values] == ["a"]
    assert {name: (tmp_path / name).read_bytes() for name in strange} == strange


def test_only_so_many_journals_stay_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_JOURNALS", 3)
    for number in range(6):
        file_of(tmp_path, f"notes-{number}").write_bytes(b"x" * 10)
        os.utime(file_of(tmp_path, f"notes-{number}"), (number, number))
    with journals(tmp_path) as opened:
        assert opened.flush()
        assert opened.num_bytes == 30
    assert sorted(file.name[6] for file in tmp_path.iterdir()) == ["3", "4", "5"]


def test_who_asks_before_it_is_read_waits(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", 1)
    goes_on, seen = threading.Event(), []

    def take(found: Restored) -> None:
        goes_on.wait(30)
        seen.append(found)

    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        journal.restore(take)
        waiting: Callable[[], None] = lambda: (journal.wait(), seen.append("waited"))[0]  # noqa: E731
        thread = threading.Thread(target=waiting)
        thread.start()
        goes_on.set()
        thread.join(30)
        assert [type(item) for item in seen] == [Restored, str]
