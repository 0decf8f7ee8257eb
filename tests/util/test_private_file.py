"""A file for its owner alone, complete or not there."""

import stat
from pathlib import Path

import pytest

from vllm_mlx.util.private_file import write_private


def test_it_replaces_an_older_file_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_private(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
