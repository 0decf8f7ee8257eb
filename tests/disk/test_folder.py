"""What is added to a folder is found again by the next server; damage and strangers' files never are."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disk.samples import expected, folder, numbers, opened, read, run, state
from vllm_mlx.disk import folder as folder_module
from vllm_mlx.disk.faults import Damaged, FolderUnusable
from vllm_mlx.disk.folder import Folder, look
from vllm_mlx.disk.record import Record


def grown(place: Folder, *, salt: str = "", fingerprint: str = "model") -> list[Record]:
    """Two branches of a conversation: 0-8-12 with a state at its end, and 0-6-14."""
    fields = {"salt": salt, "fingerprint": fingerprint}
    root = place.add(run(**fields), numbers(0))
    first = place.add(run(8, 4, parent=root.name, seed=1, **fields), numbers(1))
    end = place.add(state(12, first.name, **fields), numbers(2))
    second = place.add(run(6, 8, parent=root.name, seed=3, **fields), numbers(3))
    return [root, first, end, second]


def files(root: Path) -> set[str]:
    return {file.stem for file in root.rglob("*.kv")}


def test_a_new_folder_finds_what_was_added(tmp_path):
    with opened(tmp_path, clock=lambda: 1e9) as place:
        records = grown(place)
    with opened(tmp_path) as place:
        found = list(place.scan())
        assert {record.name: record for record in found} == {record.name: record for record in records}
        for index, record in enumerate(records):
            assert read(place, record) == expected(index) and record.used_s == 1e9


def test_parents_come_before_children(tmp_path):
    with opened(tmp_path) as place:
        for seed in range(5):
            parent = place.add(run(seed=10 * seed), numbers())
            for depth in range(1, 5):
                parent = place.add(run(8 * depth, parent=parent.name, seed=10 * seed + depth), numbers())
    seen = {""}
    with opened(tmp_path) as place:
        for record in place.scan():
            assert record.header.parent in seen
            seen.add(record.name)
    assert len(seen) == 26


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_tensors_may_come_in_pieces(tmp_path, size):
    cut = [(name, dtype, shape, iter([data[at : at + size] for at in range(0, len(data), size)]))
           for name, dtype, shape, data in numbers()]  # fmt: skip
    place = folder(tmp_path)
    assert read(place, place.add(run(), cut)) == expected()


def test_without_preadv_the_same_bytes_are_read(tmp_path, monkeypatch):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    monkeypatch.delattr(os, "preadv")
    assert read(place, record) == expected()


def test_bytes_that_do_not_fit_their_shape_are_a_bug_and_leave_nothing(tmp_path):
    place = folder(tmp_path)
    [(name, dtype, shape, data), *_] = numbers()
    with pytest.raises(AssertionError):
        place.add(run(), [(name, dtype, shape, data[:-1])])
    assert files(tmp_path) == set() and place.usage().num_records == 0


def test_only_the_user_may_read(tmp_path):
    place = folder(tmp_path / "root")
    grown(place)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {mode for name, mode in modes.items() if name in ("root", "root/records")} == {0o700}
    assert {mode for name, mode in modes.items() if name not in ("root", "root/records")} == {0o600}


def test_uses_are_noted(tmp_path):
    with opened(tmp_path, clock=lambda: 1000.0) as place:
        record = place.add(run(), numbers())
        place.note_use([record], 2000.0)
    with opened(tmp_path) as place:
        assert [found.used_s for found in place.scan()] == [2000.0]
    with opened(tmp_path, clock=lambda: 1500.0) as place:
        assert [found.used_s for found in place.scan()] == [1500.0], "the clock was put back"


def test_orphans_and_files_without_a_row_are_removed(tmp_path, caplog):
    with opened(tmp_path) as place:
        root, *_ = grown(place)
        other = place.add(run(seed=9), numbers())
        place.path_of(root).unlink()
        place.path_of(other).with_name(f"{1:016x}.kv").write_bytes(b"half a record")
    with opened(tmp_path) as place:
        assert list(place.scan()) == [other] and files(tmp_path) == {other.name}
        assert [line.message for line in caplog.records] == [
            f"Removed a damaged record from the cache on disk: {place.path_of(root)} (its file is missing).",
            "Removed 3 records from the cache on disk, because the records before them are gone.",
        ]
        assert place.usage().num_records == 1


def cut(content: bytearray) -> None:
    del content[-3:]


def flip(content: bytearray) -> None:
    content[90] ^= 16


def longer(content: bytearray) -> None:
    content.extend(b"\0")


def change(path: Path, damage: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, longer])
def test_a_file_of_another_size_is_removed_at_the_start(tmp_path, caplog, damage):
    with opened(tmp_path) as place:
        root, first, end, second = grown(place)
        change(place.path_of(second), damage)
    with opened(tmp_path) as place:
        assert {record.name for record in place.scan()} == {root.name, first.name, end.name}
        assert not place.path_of(second).exists() and list(place.damages) == [place.path_of(second)]
    [line] = caplog.records
    assert "Removed a damaged record" in line.message and str(place.path_of(second)) in line.message


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_file_is_removed_when_it_is_read(tmp_path, caplog, damage):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    change(place.path_of(record), damage)
    with pytest.raises(Damaged):
        read(place, record)
    assert not place.path_of(record).exists() and list(place.scan()) == []
    [line] = caplog.records
    assert "Removed a damaged record" in line.message


def test_swapped_files_are_never_read(tmp_path):
    place = folder(tmp_path)
    one, other = place.add(run(), numbers()), place.add(run(seed=1), numbers(1))
    paths = place.path_of(one), place.path_of(other)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[::-1], strict=True):
        path.write_bytes(content)
    for record in (one, other):
        with pytest.raises(Damaged):
            read(place, record)
    assert list(place.scan()) == []


def failing(number: int) -> Callable[..., int]:
    def read(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return read


def test_a_file_that_the_disk_cannot_read_is_removed(tmp_path, monkeypatch):
    place = folder(tmp_path)
    one, other = place.add(run(), numbers()), place.add(run(seed=1), numbers(1))
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(Damaged):
        read(place, one)
    assert not place.path_of(one).exists() and place.path_of(other).exists()


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, number):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(number))
        with pytest.raises(FolderUnusable):
            read(place, record)
    assert read(place, record) == expected()


def test_files_that_are_not_named_like_records_are_left_alone(tmp_path):
    with opened(tmp_path) as place:
        record = place.add(run(), numbers())
        own = place.path_of(record)
    strangers = [tmp_path / "model.safetensors", tmp_path / "a" / own.name, own.with_name("notes.txt"),
                 own.with_name("12.kv"), own.with_suffix(""), own.with_name(f"{2:016x}.kv") / "file"]  # fmt: skip
    for file in strangers:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"mine")
    with opened(tmp_path) as place:
        assert list(place.scan()) == [record]
    assert [file.read_bytes() for file in strangers] == [b"mine"] * len(strangers)


@pytest.mark.parametrize("starts", [True, False])
def test_a_link_is_not_followed(tmp_path, starts):
    with opened(tmp_path / "root") as place:
        record = place.add(run(), numbers())
        path, elsewhere = place.path_of(record), tmp_path / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        if not starts:
            with pytest.raises(Damaged):
                read(place, record)
    with opened(tmp_path / "root") as place:
        assert list(place.scan()) == [] and elsewhere.exists() and not path.is_symlink()


@pytest.mark.parametrize("name", ["index.sqlite", "owner.lock", "records"])
def test_a_link_in_place_of_an_own_file_is_not_followed(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir() if name == "records" else outside.write_bytes(b"mine")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / name).symlink_to(outside)
    with pytest.raises(FolderUnusable):
        folder(tmp_path / "root").add(run(), numbers())
    assert list(outside.iterdir()) == [] if name == "records" else outside.read_bytes() == b"mine"


def test_a_look_beside_the_owner_finds_the_same_and_changes_nothing(tmp_path):
    assert look(tmp_path).records == [] and list(tmp_path.iterdir()) == []
    with opened(tmp_path) as place:
        place.note_model("model", "Name")
        list(place.scan())
        records = grown(place)
        place.path_of(records[-1]).unlink()
        found = look(tmp_path)
        assert {record.name for record in found.records} == {record.name for record in records[:-1]}
        assert found.reasons == {records[-1].name: "its file is missing"} and found.models == {"model": "Name"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert look(tmp_path) == found
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_every_byte_is_verified(tmp_path):
    with opened(tmp_path) as place:
        record = place.add(run(), numbers())
        path, content = place.path_of(record), place.path_of(record).read_bytes()
        assert folder_module.verify(tmp_path, None) == (1, len(content), {})
        for at in range(0, len(content), 7):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert list(folder_module.verify(tmp_path, None)[2]) == [path] and path.exists()
        assert list(folder_module.verify(tmp_path, place)[2]) == [path] and not path.exists()
        assert folder_module.verify(tmp_path, place) == (0, 0, {})
