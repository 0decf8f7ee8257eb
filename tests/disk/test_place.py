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
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_bytes(bytes(10**6))
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


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_read_only_folder_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in str(place.prepare(folder / "below"))
