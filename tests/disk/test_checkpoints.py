"""Notes on the checkpoints of a folder."""

from pathlib import Path

from vllm_mlx.disk.checkpoints import Note, read_notes, write_note

NOTES = [Note(fingerprint=f"{number:032x}", model=f"org/model-{number}", path=f"/models/{number}") for number in (1, 2)]


def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == {}
    for note in (*NOTES, NOTES[0]):
        write_note(tmp_path, note)
    assert read_notes(tmp_path) == {note.fingerprint: note for note in NOTES}
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_damaged_notes_are_left_out(tmp_path: Path) -> None:
    write_note(tmp_path, NOTES[1])
    assert read_notes(tmp_path) == {NOTES[1].fingerprint: NOTES[1]}
    [file] = tmp_path.rglob("*.json")
    file.write_bytes(file.read_bytes()[:-3])
    assert read_notes(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_note(tmp_path / "missing" / "far", NOTES[0])
    (tmp_path / "checkpoints").touch()
    write_note(tmp_path, NOTES[0])
    assert read_notes(tmp_path) == {}
