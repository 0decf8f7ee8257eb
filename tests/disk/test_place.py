"""Where the prefix cache lies on disk, and how much it may take there."""

import os
import shutil
from pathlib import Path

import pytest

from vllm_mlx.disk import place


def test_a_mac_keeps_it_among_the_users_caches() -> None:
    assert place.default_folder({"XDG_CACHE_HOME": "/x"}, "darwin") == Path.home() / "Library/Caches/vllm-mlx"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, Path.home() / ".cache/vllm-mlx"), ({"XDG_CACHE_HOME": "/x"}, Path("/x/vllm-mlx")),
     ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/vllm-mlx")],
)  # fmt: skip
def test_elsewhere_it_lies_where_xdg_says(given: dict[str, str], expected: Path) -> None:
    assert place.default_folder(given, "linux") == expected


def test_a_folder_that_is_set_may_begin_at_home() -> None:
    assert place.folder_of("~/state") == Path.home() / "state"
    assert place.folder_of(None) == place.default_folder()


def test_the_default_limit_stays_when_the_cache_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**9 - place.held_bytes(folder)))
    empty = place.default_max_bytes(folder)
    (folder / "records").mkdir(parents=True)
    (folder / "records" / f"{'1' * 16}.kv").write_bytes(bytes(10**6))
    (folder / "below").mkdir()
    (folder / "below" / "file").write_bytes(b"of another program")
    assert place.held_bytes(folder) == 10**6
    assert place.default_max_bytes(folder) == empty == 10**8


def test_the_floor_is_a_small_part_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for total, floor in ((10**11, 2 * 10**9), (10**13, 10**10)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, total=total: usage._replace(total=total))
        assert place.floor_bytes(tmp_path / "not" / "made" / "yet") == floor


def test_a_prepared_folder_is_the_users_own_and_marked(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        assert place.prepare(folder) is None
    assert {file.name for file in folder.iterdir()} == place.MARKS
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert str(file) in str(place.prepare(file))
    assert "is not a folder" in str(place.prepare(file / "below"))


def test_a_folder_of_others_is_not_marked_nor_used(tmp_path: Path) -> None:
    """The marks would leave it out of its owner's backups and searches."""
    (tmp_path / "letter.txt").write_text("dear")
    for is_trial in (False, True):
        trouble = place.prepare(tmp_path, is_trial=is_trial)
        assert f"the cache needs a folder of its own, such as {tmp_path / 'vllm-mlx'}" in str(trouble)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    assert place.prepare(tmp_path / "vllm-mlx") is None
    (tmp_path / "vllm-mlx" / "letter.txt").write_text("dear")
    assert place.prepare(tmp_path / "vllm-mlx") is None, "it was the cache's before"


def test_what_the_system_keeps_at_the_top_of_a_disk_belongs_to_nobody(tmp_path: Path) -> None:
    for name in (".Spotlight-V100", ".Trashes", "lost+found"):
        (tmp_path / name).mkdir()
    assert place.prepare(tmp_path) is None


def test_a_look_whether_a_folder_can_be_used_leaves_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path):
        assert place.prepare(folder, is_trial=True) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_read_only_folder_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in str(place.prepare(folder / "below"))
