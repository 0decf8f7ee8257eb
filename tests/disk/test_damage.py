"""Each byte of a folder is damaged in turn: the next start never fails, and serves no wrong byte."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.disk.samples import expected, numbers, opened, read, run, state
from vllm_mlx.disk.faults import Damaged

PARTS = 16
SMALL = [("keys", "U8", (2, 16))]


def filled(root: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """The files of a folder whose server was killed, and the seeds of the records' numbers by their names."""
    with opened(root) as place:
        place.note_model("model", "Name")
        list(place.scan())
        first = place.add(run(), numbers(0, SMALL))
        second = place.add(run(8, 4, parent=first.name, seed=1), numbers(1, SMALL))
        third = place.add(state(12, second.name), numbers(2, SMALL))
        place.note_use([first], 5.0)
        seeds = {record.name: seed for seed, record in enumerate((first, second, third))}
        files = (file for file in root.rglob("*") if file.is_file() and file.suffix != ".sqlite-shm")
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}, seeds


@pytest.mark.parametrize("first", [None, *(pytest.param(part, marks=pytest.mark.full) for part in range(PARTS))])
@pytest.mark.parametrize("kind", ["database", "log", "file"])
def test_each_damaged_byte_is_a_miss_or_a_clean_start(tmp_path, kind, first, caplog):
    """`first`: each `PARTS`-th byte from there on; None: fifteen of them."""
    caplog.set_level(logging.CRITICAL)
    there, seeds = filled(tmp_path / "there")
    if kind == "database":  # as a server leaves it that is stopped: all of it is in one file
        with opened(tmp_path / "there") as place:
            place.database.shorten()
        there = {name: (tmp_path / "there" / name).read_bytes() for name in there if not name.endswith("-wal")}
    ends = {"database": ".sqlite", "log": "-wal", "file": ".kv"}
    [name, *_] = [name for name in there if name.endswith(ends[kind])]
    content = there[name]
    places = range(0, len(content), len(content) // 15 | 1) if first is None else range(first, len(content), PARTS)
    num_intact = 0
    for at in places:
        root = tmp_path / f"{at}"
        for other, bytes_ in {**there, name: content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]}.items():
            (root / other).parent.mkdir(exist_ok=True, parents=True)
            (root / other).write_bytes(bytes_)
        with opened(root) as place:
            found = list(place.scan())
            try:
                for record in found:
                    assert read(place, record) == expected(seeds[record.name], SMALL), at
                num_intact += len(found) == len(seeds)
            except Damaged:
                assert kind == "file"
            again = place.add(run(seed=9), numbers(9, SMALL))
        with opened(root) as place:
            assert again in place.scan() and read(place, again) == expected(9, SMALL), "it goes on"
        shutil.rmtree(root)
    assert num_intact < len(places) and (kind != "database" or num_intact)


def test_tables_of_another_shape_are_made_again(tmp_path):
    """A bit of the schema may flip so that SQLite goes on, and reads other values: here no id of a row."""
    with opened(tmp_path) as place:
        place.add(run(), numbers(0, SMALL))
    database = tmp_path / "index.sqlite"
    content = database.read_bytes()
    assert b"INTEGER PRIMARY" in content
    database.write_bytes(content.replace(b"INTEGER PRIMARY", b"INTEGERaPRIMARY"))
    with opened(tmp_path) as place:
        assert list(place.scan()) == []
        assert place.add(run(), numbers(0, SMALL)) in place.scan()


def test_what_was_removed_while_its_read_was_planned_is_no_damage(tmp_path, caplog):
    with opened(tmp_path) as place:
        kept, removed = place.add(run(), numbers()), place.add(run(seed=1), numbers(1))
        place.remove([removed])
        for record, num_damages in ((removed, 0), (kept, 1)):
            place.path_of(record).unlink(missing_ok=True)
            with pytest.raises(Damaged):
                read(place, record)
            assert len(place.damages) == len(caplog.messages) == num_damages
