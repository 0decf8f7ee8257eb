"""Files come from one folder, whatever path or link is given."""

import os
from pathlib import Path

import pytest

from vllm_mlx.core.errors import ConfigError, InvalidImage
from vllm_mlx.media.sources import MediaRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"a")
    (folder / "inner" / "b.png").write_bytes(b"b")
    (tmp_path / "secret.png").write_bytes(b"s")
    (tmp_path / "media-not").mkdir()
    (tmp_path / "media-not" / "c.png").write_bytes(b"c")
    return folder


def test_files_of_the_folder_are_read(root: Path) -> None:
    media = MediaRoot(str(root))
    (root / "link.png").symlink_to(root / "inner" / "b.png")
    (root / "folder").symlink_to(root / "inner")
    assert media.read(str(root / "a.png"), 10) == b"a"
    assert media.read(str(root / "inner" / ".." / "a.png"), 10) == b"a"
    assert media.read(str(root / "link.png"), 10) == b"b"
    assert media.read(str(root / "folder" / "b.png"), 10) == b"b"


def test_a_folder_may_be_named_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert MediaRoot(str(tmp_path / "alias")).read(str(root / "a.png"), 10) == b"a"
    assert MediaRoot(str(root)).read(str(tmp_path / "alias" / "a.png"), 10) == b"a"


def test_everything_else_is_one_refusal(root: Path, tmp_path: Path) -> None:
    """So that nobody learns which files there are elsewhere."""
    media = MediaRoot(str(root))
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "inner" / "pipe")
    paths = [tmp_path / "secret.png", root / ".." / "secret.png", root / "out.png", root / "up" / "secret.png",
             tmp_path / "media-not" / "c.png", root / "none.png", tmp_path / "none.png", root, root / "inner",
             root / "loop", root / "pipe", root / "a.png" / "b", "/etc/passwd", "/dev/zero", "/", "/a\0b",
             root / ("x" * 5000)]  # fmt: skip
    refusals = set()
    for path in paths:
        with pytest.raises(InvalidImage) as caught:
            media.read(str(path), 10)
        refusals.add(caught.value.message)
    assert len(refusals) == 1


def test_a_link_that_comes_between_look_and_read_leads_nowhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Path.resolve

    def resolve_then_swap(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.name == "secret.png":
            (root / "inner").rename(root / "moved")
            (root / "inner").symlink_to(tmp_path)
        return found

    media = MediaRoot(str(root))
    (root / "inner" / "secret.png").write_bytes(b"mine")
    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    with pytest.raises(InvalidImage):
        media.read(str(root / "inner" / "secret.png"), 10)


def test_a_large_file_is_refused(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 11)
    with pytest.raises(InvalidImage, match="--max-image-bytes"):
        MediaRoot(str(root)).read(str(root / "large"), 10)


def test_without_a_folder_no_file_is_read(root: Path) -> None:
    with pytest.raises(InvalidImage, match="--media-root"):
        MediaRoot(None).read(str(root / "a.png"), 10)
    with pytest.raises(ConfigError, match="--media-root"):
        MediaRoot(str(root / "none"))
