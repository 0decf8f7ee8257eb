"""Remembered values: what is kept over restarts, damage, limits and beside other servers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.disk import kept as kept_module
from vllm_mlx.disk.database import Database
from vllm_mlx.disk.kept import Journal, Journals, Kept, Memories

NAMES = st.sampled_from("abcdef")
SALTS = st.sampled_from(["", "x/", "x/1", "y/"])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, SALTS, st.none() | NAMES, st.text() | st.integers()),
        st.tuples(st.just("drop"), st.lists(NAMES, max_size=3)),
        st.tuples(st.just("use"), st.lists(NAMES, max_size=3)),
        st.tuples(st.just("clear"), SALTS),
    ),
    max_size=30,
)


class Model:
    """The same with lists, as slowly as it is obvious."""

    def __init__(self) -> None:
        self.values: list[tuple[str, str, str | None, Any]] = []
        self.order: list[str] = []

    def apply(self, change: tuple[Any, ...]) -> None:
        match change:
            case ["put", name, salt, base, value]:
                self.drop(lambda held: held[0] == name)
                self.values.append((name, salt, base, value))
                self.use(name)
            case ["drop", names]:
                self.drop(lambda held: held[0] in names)
            case ["use", names]:
                for name in names:
                    self.use(name)
            case ["clear", salts]:
                self.drop(lambda held: held[1].startswith(salts))

    def drop(self, goes: Callable[[Any], bool]) -> None:
        self.values = [held for held in self.values if not goes(held)]
        kept = [held[0] for held in self.values]
        self.order = [name for name in self.order if name in kept]

    def use(self, name: str | None) -> None:
        bases, seen = {held[0]: held[2] for held in self.values}, []
        while name in bases and name not in seen:
            seen.append(name)
            self.order = [other for other in self.order if other != name] + [name]
            name = bases[name]


@contextmanager
def journals(folder: Path, **options: Any) -> Iterator[Journals]:
    opened = Journals(Database(folder), **options)
    try:
        yield opened
    finally:
        opened.close()


def restored(journal: Journal) -> list[Kept]:
    found: list[list[Kept]] = []
    journal.restore(found.append)
    journal.wait()
    return found[0]


def kept(folder: Path, kind: str = "notes", **options: Any) -> dict[str, Any]:
    """What the next server finds."""
    with journals(folder, **options) as opened:
        return {value.name: value.value() for value in restored(opened.open(kind))}


def put(journal: Journal, name: str, value: Any, salt: str = "", base: str | None = None) -> None:
    journal.put(name, salt, lambda: value, num_bytes=len(str(value)), base=base)


def apply(opened: Journals, journal: Journal, change: tuple[Any, ...]) -> None:
    match change:
        case ["put", name, salt, base, value]:
            put(journal, name, value, salt, base)
        case ["drop", names]:
            journal.drop(names)
        case ["use", names]:
            journal.use(names)
        case ["clear", salts]:
            assert opened.flush()
            opened.clear(salts, "notes")


def model_of(changes: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    model = Model()
    for change in changes:
        model.apply(change)
    return model.values, model.order


def files_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("index.sqlite*")))


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CHANGES, min_size=1, max_size=3), st.booleans())
@example([[("put", "a", "", None, 1), ("put", "b", "", None, 2), ("use", ["a"])]], True)
def test_a_restart_finds_what_was_kept(
    tmp_path_factory: pytest.TempPathFactory, lives: list[list[tuple[Any, ...]]], flushes: bool
) -> None:
    """Whatever was changed in several lives, and in however many writes."""
    folder = tmp_path_factory.mktemp("kept")
    done: list[tuple[Any, ...]] = []
    for changes in [*lives, []]:
        with journals(folder) as opened:
            journal = opened.open("notes")
            found = restored(journal)
            values = [(value.name, value.salt, value.base, value.value()) for value in found]
            assert (values, [value.name for value in sorted(found, key=lambda value: value.used)]) == model_of(done)
            for change in changes:
                apply(opened, journal, change)
                if flushes:
                    assert opened.flush()
        done += changes


@pytest.mark.parametrize("name", ["index.sqlite", pytest.param("index.sqlite-wal", marks=pytest.mark.full)])
def test_a_damaged_byte_costs_values_and_never_makes_a_wrong_one(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At any place of the database or of its log, cut or changed."""
    there = tmp_path / "there"
    there.mkdir()
    expected = {str(number): {"text": f"value {number} é🙂", "more": "x" * number * 40} for number in range(8)}
    with journals(there) as opened:
        journal = opened.open("notes")
        for key, value in expected.items():
            put(journal, key, value)
        assert opened.flush()
        left = {file.name: file.read_bytes() for file in there.iterdir() if not file.name.endswith("-shm")}
        if name not in left or not left[name]:
            pytest.skip("SQLite keeps no log here")
    found_all = 0
    for step in range(examples(15)):
        place = step * 7919 % len(left[name])
        for damaged in (
            left[name][:place],
            left[name][:place] + bytes([left[name][place] ^ 0x41]) + left[name][place + 1 :],
        ):
            folder = tmp_path / f"{name}-{step}-{len(damaged)}"
            folder.mkdir()
            for other, content in (left | {name: damaged}).items():
                (folder / other).write_bytes(content)
            found = kept(folder)
            assert found.items() <= expected.items()
            found_all += found == expected
            with journals(folder) as opened:
                put(opened.open("notes"), "new", 1)
            assert kept(folder)["new"] == 1, "it goes on"
    assert found_all or name.endswith("-wal"), "most bytes are in no value"


def test_clearing_a_salt_leaves_no_trace_of_it_in_any_checkpoint(tmp_path: Path) -> None:
    for fingerprint in ("f1", "f2"):
        with journals(tmp_path) as opened:
            for kind in ("notes", "bills"):
                for name, salt in (("a", "one/"), ("b", "one/more"), ("c", "two/"), ("d", "")):
                    put(opened.open(kind, fingerprint), name, f"secret of {name} in {kind}", salt)
                assert opened.flush()
    with journals(tmp_path) as opened:
        mine = opened.open("notes", "f2")
        restored(mine)
        opened.clear("one/", "notes")
        assert opened.flush()
        assert [name in mine for name in "abcd"] == [False, False, True, True]
        content = files_of(tmp_path)
        assert b"secret of a in notes" not in content and b"secret of b in notes" not in content
        assert b"secret of c in notes" in content and b"secret of a in bills" in content


def test_several_checkpoints_have_their_own_replies_and_the_same_responses(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        first = Memories(opened, "f1")
        second = first.of("f2")
        assert first.replies is not None and second.replies is not None and first.responses is second.responses
        put(first.replies, "a", 1, "one/")
        put(second.replies, "a", 2, "one/")
        second.clear("one/")
        assert "a" not in first.replies and "a" not in second.replies


def test_too_much_of_a_kind_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    with journals(tmp_path, max_bytes=100_000) as opened:
        journal = opened.open("notes")
        put(journal, "base", "x")
        for number in range(60):
            put(journal, str(number), "x" * 5_000, base="base")
            if number % 10 == 0:
                assert opened.flush()
        put(journal, "too large", "x" * 30_000)
        assert opened.flush()
        assert "base" in journal and "too large" not in journal and "0" not in journal
    found = list(kept(tmp_path, max_bytes=100_000))
    assert found[0] == "base" and found[1:] == [str(number) for number in range(60 - len(found) + 1, 60)]
    assert len(found) > 10


def test_a_value_that_may_not_be_written_is_not_kept(tmp_path: Path) -> None:
    with journals(tmp_path, charge=lambda num_bytes: num_bytes < 5) as opened:
        journal = opened.open("notes")
        put(journal, "a", 1)
        put(journal, "b", "too many bytes")
        assert opened.flush() and "a" in journal and "b" not in journal
    assert kept(tmp_path) == {"a": 1}


def test_memory_for_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_WAITING_BYTES", 1000)
    with journals(tmp_path / "missing" / "below") as opened:
        journal = opened.open("notes")
        journal.put("large", "", lambda: 1, num_bytes=5000)
        journal.put("more", "", lambda: 1, num_bytes=1)
        assert "large" in journal and "more" not in journal


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with journals(tmp_path / "missing" / "below") as opened:
        journal = opened.open("notes")
        for number in range(3):
            put(journal, str(number), number)
            assert not opened.flush()
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
        (tmp_path / "missing").mkdir()
        assert opened.flush()
    assert kept(tmp_path / "missing" / "below") == {"0": 0, "1": 1, "2": 2}


def test_a_removed_folder_begins_anew(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        journal = opened.open("notes")
        put(journal, "a", 1)
        assert opened.flush()
        for file in tmp_path.iterdir():
            file.unlink()
        put(journal, "b", 2, base="a")
        assert opened.flush()
    assert kept(tmp_path) == {"b": 2}


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


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes", "a1b2"), "a", 1)
        assert opened.flush()
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_what_is_put_while_the_values_are_read_is_known_and_can_be_dropped(tmp_path: Path) -> None:
    old, new = [str(number) for number in range(3)], []
    with journals(tmp_path) as opened:
        for name in old:
            put(opened.open("notes"), name, 1)

    found: list[list[Kept]] = []

    def switch(frame: FrameType, event: str, argument: object) -> Any:
        """Let another thread run before each step of the module."""
        if frame.f_code.co_filename != kept_module.__file__:
            return None
        frame.f_trace_opcodes = not found
        time.sleep(0 if found else 1e-3)
        return None if found else switch

    threading.settrace(switch)
    try:
        with journals(tmp_path) as opened:
            journal = opened.open("notes")
            journal.restore(found.append)
            time.sleep(0.1)  # what is put now would be written first, which takes long
            while not found:
                new.append(f"new {len(new)}")
                put(journal, new[-1], 1)
                time.sleep(1e-3)
            journal.wait()
            assert all(name in journal for name in (*old, *new))
            journal.drop(new)
    finally:
        threading.settrace(None)
    assert list(kept(tmp_path)) == old


def test_what_is_cleared_while_the_values_are_read_is_not_among_them(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        for name, salt in (("a", "one/"), ("b", "two/")):
            put(opened.open("notes"), name, 1, salt)
    with journals(tmp_path) as opened:
        journal, found = opened.open("notes"), []
        journal.restore(found.append)
        opened.clear("one/", "notes")
        journal.wait()
        assert [value.name for value in found[0]] == ["b"] and "a" not in journal


def test_a_value_that_is_not_kept_leaves_no_earlier_one(tmp_path: Path) -> None:
    with journals(tmp_path, max_bytes=1000) as opened:
        journal = opened.open("notes")
        put(journal, "a", "x")
        put(journal, "b", "x")
        assert opened.flush()
        put(journal, "a", "x" * 999)
        assert opened.flush() and "a" not in journal
    assert kept(tmp_path) == {"b": "x"}


def test_a_disk_that_hangs_gives_its_values_later(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", 1)
    goes_on, found, database = threading.Event(), [], Database(tmp_path)
    hanging = threading.Thread(target=database.run, args=(lambda connection: goes_on.wait(60),))
    hanging.start()
    opened = Journals(database, max_wait_s=0.1)
    journal = opened.open("notes")
    journal.restore(found.append)
    journal.wait()
    assert not found
    put(journal, "b", 2)
    goes_on.set()
    assert opened.flush() and [value.name for value in found[0]] == ["a"]
    opened.close()
    hanging.join()
    assert kept(tmp_path) == {"a": 1, "b": 2}


def test_who_asks_before_it_is_read_waits(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", 1)
    goes_on, seen = threading.Event(), []

    def take(found: list[Kept]) -> None:
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
        assert [type(item) for item in seen] == [list, str]
