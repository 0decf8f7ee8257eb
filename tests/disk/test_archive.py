"""A conversation's prefix travels as one file between folders, encrypted or not; damage does not."""

import tarfile

import pytest

from tests.disk.samples import expected, folder, numbers, read, run, state
from vllm_mlx.disk.archive import export_path, import_path, verify
from vllm_mlx.disk.cipher import Cipher
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Damaged, Record
from vllm_mlx.disk.record_file import write_all
from vllm_mlx.disk.space import NoRoom

KEY, OTHER = Cipher(bytes(range(32))), Cipher(bytes(32))


def conversation(place: Folder) -> list[Record]:
    root = place.add(run(salt="mine"), numbers(0))
    child = place.add(run(8, 4, parent=root.name, seed=1, salt="mine"), numbers(1))
    return [root, child, place.add(state(12, child.name, salt="mine"), numbers(2))]


@pytest.mark.parametrize("writer", [None, KEY], ids=["from plain", "from encrypted"])
@pytest.mark.parametrize("reader", [None, KEY, OTHER], ids=["to plain", "to encrypted", "to another key"])
def test_what_is_exported_can_be_imported(tmp_path, writer, reader):
    source, target = folder(tmp_path / "a", cipher=writer), folder(tmp_path / "b", cipher=reader)
    size = export_path(source, conversation(source), tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == size and (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    found = import_path(target, tmp_path / "file")
    assert list(folder(tmp_path / "b", cipher=reader).scan()) == found
    for seed, record in enumerate(found):
        assert read(target, record) == expected(seed) and record.header.salt == "mine"
    assert [record.header.start for record in found] == [0, 8, 12]
    assert import_path(target, tmp_path / "file") == found  # a second time changes nothing
    names = {record.name for record in conversation(source)}
    assert ({record.name for record in found} == names) is (writer is reader)


def test_an_exported_file_is_a_tar_of_safetensors(tmp_path):
    place = folder(tmp_path / "a")
    export_path(place, records := conversation(place), tmp_path / "file")
    with tarfile.open(tmp_path / "file") as archive:
        assert archive.getnames() == [f"{record.name}.safetensors" for record in records]
        for record, member in zip(records, archive, strict=True):
            content = archive.extractfile(member)
            assert content is not None and content.read() == place.path_of(record).read_bytes()


def test_an_export_replaces_no_file_and_leaves_none_behind(tmp_path):
    place = folder(tmp_path / "a")
    records = conversation(place)
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        export_path(place, records, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"
    place.remove(records[1])
    with pytest.raises(FileNotFoundError):
        export_path(place, records, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_every_damage_of_an_exported_file_is_noticed(tmp_path):
    place = folder(tmp_path / "a")
    export_path(place, conversation(place), tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    known = {record.name for record in place.scan()}
    for at in range(3, len(content), 97):
        for number, damaged in enumerate((content[:at], content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])):
            (tmp_path / "damaged").write_bytes(damaged)
            target = folder(tmp_path / f"{at} {number}")
            try:
                found = import_path(target, tmp_path / "damaged")
            except Damaged as error:
                assert str(tmp_path / "damaged") in str(error)
                found = list(target.scan())
            for record in found:  # what came before the damage, or all where nothing of it is used
                assert record.name in known and read(target, record) == expected([0, 8, 12].index(record.header.start))


@pytest.mark.parametrize("content", [b"", b"text" * 1000, b"PK\3\4" + bytes(1000)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(Damaged, match="cannot be imported"):
        import_path(folder(tmp_path / "a"), tmp_path / "file")


@pytest.mark.parametrize("name", ["../../escape", "notes.txt", "a" * 40 + ".safetensors"])
def test_other_archives_are_refused(tmp_path, name):
    (tmp_path / "x").write_bytes(b"x")
    with tarfile.open(tmp_path / "file", "w") as archive:
        archive.add(tmp_path / "x", arcname=name)
    with pytest.raises(Damaged, match="cannot be imported"):
        import_path(folder(tmp_path / "a"), tmp_path / "file")
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_import_keeps_the_limits(tmp_path):
    place = folder(tmp_path / "a")
    export_path(place, records := conversation(place), tmp_path / "file")
    for limit in ("max_bytes", "daily_bytes"):
        target = folder(tmp_path / limit, **{limit: sum(record.file_bytes for record in records) - 1})
        with pytest.raises(NoRoom):
            import_path(target, tmp_path / "file")
        assert len(list(target.scan())) == 2


@pytest.mark.parametrize("cipher", [None, KEY], ids=["plain", "encrypted"])
def test_every_byte_is_verified(tmp_path, cipher):
    place = folder(tmp_path, cipher=cipher)
    records = conversation(place)
    assert [(found.path, found.fault) for found in verify(place)] == [(place.path_of(one), None) for one in records]
    with place.path_of(records[2]).open("r+b") as file:
        file.seek(records[2].tensors[1].offset)
        write_all(file.fileno(), bytes(8))
    faults = {found.path: found.fault for found in verify(place)}
    assert "keys.0" not in str(faults) and "values.0 is damaged" in str(faults.pop(place.path_of(records[2])))
    assert set(faults.values()) == {None} and len(faults) == 2
    with place.path_of(records[0]).open("r+b") as file:
        file.truncate(50)
    [found] = verify(folder(tmp_path, cipher=cipher))
    assert found.path == place.path_of(records[0]) and found.fault == "its header is cut short"
