"""The speed of a disk is measured on a file that does not stay."""

from pathlib import Path

from vllm_mlx.disk.read_speed import measure_read


def test_a_disk_has_a_speed_and_keeps_nothing(tmp_path: Path) -> None:
    speed = measure_read(tmp_path)
    assert speed is not None and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_has_none(tmp_path: Path) -> None:
    assert measure_read(tmp_path / "missing") is None
