"""What is added to a folder is found again, by this server and by others; damage never is."""

import contextlib
import errno
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disk.samples import expected, folder, numbers, read, run, state
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Damaged, Record
from vllm_mlx.disk.space import FolderUnusable


def grown(place: Folder, *, salt: str = "", fingerprint: str = "model") -> list[Record]:
    """Two branches of a conversation: 0-8-12 with a state at its end, and 0-6-14."""
    fields = {"salt": salt, "fingerprint": fingerprint}
    root = place.add(run(**fields), numbers(0))
    first = place.add(run(8, 4, parent=root.name, seed=1, **fields), numbers(1))
    end = place.add(state(12, first.name, **fields), numbers(2))
    second = place.add(run(6, 8, parent=root.name, seed=3, **fields), numbers(3))
    return [root, first, end, second]


def test_a_new_folder_finds_what_was_added(tmp_path):
    records = grown(folder(tmp_path, clock=lambda: 1e9))
    place = folder(tmp_path)
    found = list(place.scan())
    assert {record.name: record for record in found} == {record.name: record for record in records}
    for index, record in enumerate(records):
        assert read(place, record) == expected(index) and record.used_s == 1e9


def test_parents_come_before_children(tmp_path):
    place = folder(tmp_path)
    for seed in range(5):
        parent = place.add(run(seed=10 * seed), numbers())
        for depth in range(1, 5):
            parent = place.add(run(8 * depth, parent=parent.name, seed=10 * seed + depth), numbers())
    seen = {""}
    for record in folder(tmp_path).scan():
        assert record.header.parent in seen
        seen.add(record.name)
    assert len(seen) == 26


def test_checkpoints_and_salts_share_nothing(tmp_path):
    place = folder(tmp_path)
    records = [*grown(place), *grown(place, salt="mine"), *grown(place, fingerprint="other")]
    assert len({record.name for record in records}) == 12
    assert len({place.path_of(record).parent for record in records}) == 2
    assert sum(record.header.salt == "mine" for record in folder(tmp_path).scan()) == 4


def test_only_the_user_may_read(tmp_path):
    place = folder(tmp_path / "root")
    for record in grown(place):
        assert place.path_of(record).stat().st_mode & 0o777 == 0o600
        assert place.path_of(record).parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700


def test_what_is_there_is_not_written_again(tmp_path):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    before = place.usage()
    assert folder(tmp_path).add(run(), numbers(1)) == place.add(run(), numbers(1)) == record
    assert place.usage().used_bytes == before.used_bytes and read(place, record) == expected()  # others write, too


def test_a_child_is_not_written_without_its_parent(tmp_path):
    place = folder(tmp_path)
    parent = place.add(run(), numbers())
    place.remove(parent)
    with pytest.raises(FileNotFoundError):
        place.add(run(8, parent=parent.name), numbers())
    assert list(place.scan()) == [] and place.usage().num_records == 0


def test_a_removed_record_is_gone(tmp_path):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    place.remove(record)
    place.remove(record)
    for use in (lambda: read(place, record), lambda: place.touch(record)):
        with pytest.raises(FileNotFoundError):
            use()
    assert list(folder(tmp_path).scan()) == []


def test_uses_are_noted(tmp_path):
    now = [1000.0]
    place = folder(tmp_path, clock=lambda: now[0])
    record = place.add(run(), numbers())
    now[0] = 2000.0
    place.touch(record)
    assert [found.used_s for found in folder(tmp_path).scan()] == [2000.0]


def test_orphans_are_removed(tmp_path, caplog):
    place = folder(tmp_path)
    root, *_ = grown(place)
    other = place.add(run(seed=9), numbers())
    place.path_of(root).unlink()
    place = folder(tmp_path)
    assert list(place.scan()) == [other]
    assert [file.name for file in tmp_path.rglob("*.safetensors")] == [place.path_of(other).name]
    assert [line.message for line in caplog.records] == [
        "Removed 3 records from the cache on disk, because what they continue is gone."
    ]
    assert place.usage().used_bytes == place.usage().num_records * other.file_bytes


def cut(content: bytearray, at: int) -> None:
    del content[at:]


def flip(content: bytearray, at: int) -> None:
    content[at] ^= 16


def numbers_at(record: Record, content: bytes) -> int:
    return record.tensors[1].offset + 3


HEADERS: dict[str, Callable[[bytearray], None]] = {
    "nothing left": lambda content: cut(content, 0),
    "cut in the header": lambda content: cut(content, 200),
    "cut in the numbers": lambda content: cut(content, len(content) - 60),
    "longer": lambda content: content.extend(b"\0"),
    "zeros": lambda content: content.__setitem__(slice(None), bytes(len(content))),
    "a bit of the length": lambda content: flip(content, 1),
    "a bit of the header": lambda content: flip(content, 150),
    "a foreign file": lambda content: content.__setitem__(slice(None), b"\x02\0\0\0\0\0\0\0{}"),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_damaged_file_is_removed_at_the_start(tmp_path, caplog, damage):
    place = folder(tmp_path)
    root, first, end, second = grown(place)
    change(place.path_of(second), HEADERS[damage])
    place = folder(tmp_path)
    assert {record.name for record in place.scan()} == {root.name, first.name, end.name}
    assert not place.path_of(second).exists() and [found.path for found in place.damages] == [place.path_of(second)]
    [line] = caplog.records
    assert "Removed a damaged record" in line.message and str(place.path_of(second)) in line.message
    assert place.add(second.header, numbers(3)).name == second.name


@pytest.mark.parametrize("damage", [*HEADERS, "a bit of the numbers"])
def test_a_damaged_file_is_removed_when_it_is_read(tmp_path, caplog, damage):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    change(place.path_of(record), HEADERS.get(damage, lambda content: flip(content, record.tensors[1].offset + 3)))
    served = []
    for index, tensor in enumerate(record.tensors):
        buffer = bytearray(tensor.nbytes)
        try:
            place.read_into(record, index, memoryview(buffer))
            served.append(bytes(buffer) == expected()[index][3])
        except (Damaged, FileNotFoundError):
            pass
    assert all(served)
    if damage not in ("longer", "a bit of the length", "a bit of the header"):  # these leave the numbers as they are
        assert len(served) < len(record.tensors) and not place.path_of(record).exists()
        [line] = caplog.records
        assert "Removed a damaged record" in line.message


def change(path: Path, damage: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)


def failing(number: int) -> Callable[..., int]:
    def read(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return read


def test_a_file_that_the_disk_cannot_read_is_removed(tmp_path, monkeypatch, caplog):
    place = folder(tmp_path)
    one, other = place.add(run(), numbers()), place.add(run(seed=1), numbers(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(Damaged):
            read(place, one)
    assert not place.path_of(one).exists() and place.path_of(other).exists()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", failing(errno.EIO))
        assert list(folder(tmp_path).scan()) == []
    assert not place.path_of(other).exists() and len(caplog.records) == 2


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, number):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(number))
        with pytest.raises(FolderUnusable):
            read(place, record)
    assert read(place, record) == expected()


def test_swapped_files_are_removed(tmp_path, caplog):
    place = folder(tmp_path)
    one, other = place.add(run(), numbers()), place.add(run(seed=1), numbers(1))
    paths = place.path_of(one), place.path_of(other)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[::-1], strict=True):
        path.write_bytes(content)
    with pytest.raises(Damaged):
        read(place, one)
    assert list(folder(tmp_path).scan()) == []
    assert not any(path.exists() for path in paths) and len(caplog.records) == 2


def test_a_record_in_the_folder_of_another_checkpoint_is_removed(tmp_path):
    place = folder(tmp_path)
    record, other = place.add(run(), numbers()), place.add(run(fingerprint="other"), numbers())
    place.path_of(record).rename(place.path_of(other).parent / place.path_of(record).name)
    assert list(folder(tmp_path).scan()) == [other] and len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_files_that_are_not_named_like_records_are_left_alone(tmp_path):
    place = folder(tmp_path)
    record = place.add(run(), numbers())
    own = place.path_of(record)
    files = [tmp_path / "model.safetensors", tmp_path / "a" / own.name, own.with_name("notes.txt"),
             own.with_name("model-00001-of-00002.safetensors"), own.with_suffix("")]  # fmt: skip
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"mine")
    assert list(folder(tmp_path).scan()) == [record]
    assert [file.read_bytes() for file in files] == [b"mine"] * len(files)


def test_a_link_is_not_followed(tmp_path):
    place = folder(tmp_path / "root")
    record = place.add(run(), numbers())
    path, elsewhere = place.path_of(record), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert list(folder(tmp_path / "root").scan()) == [] and elsewhere.exists()


def of_another_version(root, monkeypatch):
    """Records that a later version has written."""
    with monkeypatch.context() as patched:
        for module in ("record", "record_file"):
            patched.setattr(f"vllm_mlx.disk.{module}.VERSION", "8")
        return grown(folder(root))


def test_records_of_other_versions_are_left_alone_and_counted(tmp_path, caplog, monkeypatch):
    others = of_another_version(tmp_path, monkeypatch)
    place = folder(tmp_path)
    assert list(place.scan()) == []
    [line] = caplog.records
    assert "has 4 records" in line.message
    usage = place.usage()
    assert usage.other_bytes == sum(record.file_bytes for record in others) == usage.used_bytes
    own = grown(place)
    assert place.changes().added == ()
    assert place.remove_others(10**9) == 0, "they may be in use"
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(own) + len(others)


def test_records_of_other_versions_that_nobody_uses_make_room_the_oldest_first(tmp_path, monkeypatch):
    others = of_another_version(tmp_path, monkeypatch)
    days = dict(zip((record.name for record in others), (9, 2, 20, 8), strict=True))
    for file in tmp_path.rglob("*.safetensors"):
        used_s = file.stat().st_mtime - days[file.stem] * 86400
        os.utime(file, (used_s, used_s))
    place = folder(tmp_path)
    assert list(place.scan()) == []
    own = grown(place)

    def left() -> list[int]:
        return sorted(days[file.stem] for file in tmp_path.rglob("*.safetensors") if file.stem in days)

    assert place.remove_others(1) > 0 and left() == [2, 8, 9]
    [file] = [file for file in tmp_path.rglob("*.safetensors") if days.get(file.stem) == 9]
    os.utime(file)
    before = place.usage().used_bytes
    assert place.remove_others(10**9) == before - place.usage().used_bytes > 0
    assert left() == [2, 9] and place.remove_others(10**9) == 0, "a server of that version has used it since"
    assert {record.name for record in own} <= {file.stem for file in tmp_path.rglob("*.safetensors")}


def test_unknown_versions_are_left_alone_and_counted(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patched:
        for module in ("record", "record_file"):
            patched.setattr(f"vllm_mlx.disk.{module}.VERSION", "8")
        others = grown(folder(tmp_path))
    place = folder(tmp_path)
    assert list(place.scan()) == [] and place.damages == [] and len(caplog.records) == 1
    assert place.usage().other_bytes == sum(record.file_bytes for record in others)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4


def test_changes_by_another_server_are_seen(tmp_path):
    ours, theirs = folder(tmp_path), folder(tmp_path)
    assert list(ours.scan()) == list(theirs.scan()) == []
    assert ours.changes().added == ()
    records = grown(theirs)
    added = ours.changes().added
    assert sorted(added, key=lambda record: record.name) == sorted(records, key=lambda record: record.name)
    assert [record.header.start for record in added] == sorted(record.header.start for record in added)
    assert ours.changes().added == () and ours.changes().removed == frozenset()
    assert read(ours, records[0]) == expected()
    theirs.remove(records[2])
    own = ours.add(run(seed=5), numbers())
    assert ours.changes().removed == {records[2].name} and ours.changes().removed == frozenset()
    assert theirs.changes().added == (own,)
    with pytest.raises(FileNotFoundError):
        read(ours, records[2])


def test_a_record_that_another_server_replaced_is_not_removed(tmp_path):
    ours, theirs = folder(tmp_path), folder(tmp_path)
    record = ours.add(run(), numbers())
    theirs.remove(record)
    newer = theirs.add(run(), numbers(1))
    with pytest.raises(FileNotFoundError):
        read(ours, record)
    assert ours.changes().added == (newer,) and read(ours, newer) == expected(1)


def test_a_child_that_is_seen_before_its_parent_waits(tmp_path):
    ours, theirs = folder(tmp_path), folder(tmp_path)
    parent, child, *_ = grown(theirs)
    hidden = tmp_path / "hidden"
    theirs.path_of(parent).rename(hidden)
    assert ours.changes().added == ()
    hidden.rename(theirs.path_of(parent))
    assert [record.name for record in ours.changes().added][:1] == [parent.name] and child.name in ours._known


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_anywhere_serves_wrong_bytes(tmp_path, seed, caplog):
    """Random damage to random files of a folder, then a start, then reading of everything."""
    caplog.set_level(logging.ERROR)
    rng = random.Random(seed)
    names = [record.name for record in grown(folder(tmp_path))]
    for _ in range(30):
        files = sorted(tmp_path.rglob("*.safetensors"))
        if not files:
            break
        file = rng.choice(files)
        content = bytearray(file.read_bytes())
        match rng.randrange(4):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                del content[rng.randrange(len(content)) :]
            case 2:
                content[:] = rng.choice(files).read_bytes()
            case 3:
                at = rng.randrange(len(content))
                content[at : at + 16] = bytes(16)
        file.write_bytes(content)
        place = folder(tmp_path)
        for record in place.scan():
            with contextlib.suppress(Damaged, FileNotFoundError):
                assert read(place, record) == expected(names.index(record.name))
        grown(place)
        assert len(list(folder(tmp_path).scan())) == 4
