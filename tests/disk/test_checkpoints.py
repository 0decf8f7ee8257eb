"""Notes on the checkpoints of a folder."""

from pathlib import Path

import pytest

from vllm_mlx.disk.checkpoints import Note, read_notes, write_note
from vllm_mlx.disk.cipher import Cipher

NOTES = [Note(fingerprint=f"{number:032x}", model=f"org/model-{number}", path=f"/models/{number}") for number in (1, 2)]


@pytest.mark.parametrize("cipher", [None, Cipher(b"k" * 32)], ids=["plain", "encrypted"])
def test_what_is_noted_is_read_again(tmp_path: Path, cipher: Cipher | None) -> None:
    assert read_notes(tmp_path, cipher) == {}
    for note in (*NOTES, NOTES[0]):
        write_note(tmp_path, note, cipher)
    assert read_notes(tmp_path, cipher) == {note.fingerprint: note for note in NOTES}
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    seen = b"".join(file.read_bytes() + file.name.encode() for file in files)
    assert (b"org/model-1" in seen) == (cipher is None)


def test_notes_of_another_key_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    write_note(tmp_path, NOTES[0], Cipher(b"a" * 32))
    write_note(tmp_path, NOTES[1])
    assert read_notes(tmp_path, Cipher(b"b" * 32)) == {}
    assert read_notes(tmp_path) == {NOTES[1].fingerprint: NOTES[1]}
    [file] = [file for file in tmp_path.rglob("*.json") if b"org" in file.read_bytes()]
    file.write_bytes(file.read_bytes()[:-3])
    assert read_notes(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_note(tmp_path / "missing" / "far", NOTES[0])
    (tmp_path / "checkpoints").touch()
    write_note(tmp_path, NOTES[0])
    assert read_notes(tmp_path) == {}
