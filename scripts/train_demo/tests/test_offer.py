"""A new checkpoint takes the bundled one's place only if it scores as well, or is forced to."""

import json
from pathlib import Path

import pytest

from scripts.train_demo.__main__ import offer


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Make a fresh checkpoint, and a bundled one that scores 90 % and has a page beside it."""
    fresh, bundled = tmp_path / "fresh", tmp_path / "bundled"
    for folder, weights in ((fresh, "new"), (bundled, "old")):
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights)
    (bundled / "scores.json").write_text('{"overall": 0.9}')
    (bundled / "README.md").write_text("kept")
    return fresh, bundled


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_worse_one_is_refused_and_both_stay(folders, capsys: pytest.CaptureFixture[str]) -> None:
    fresh, bundled = folders
    before = contents(bundled)
    assert not offer(fresh, bundled, {"overall": 0.8999}, force=False)
    assert contents(bundled) == before
    assert contents(fresh)["model.safetensors"] == "new"
    told = capsys.readouterr().out
    assert "scores 90.00%, the new one 89.99%: kept" in told
    assert str(fresh) in told


@pytest.mark.parametrize(("overall", "force"), [(0.95, False), (0.9, False), (0.5, True)])
def test_a_better_one_an_equal_one_and_a_forced_one_are_installed(folders, overall: float, force: bool) -> None:
    fresh, bundled = folders
    assert offer(fresh, bundled, {"overall": overall}, force=force)
    after = contents(bundled)
    assert after["model.safetensors"] == "new"
    assert after["README.md"] == "kept"
    assert json.loads(after["scores.json"])["overall"] == overall


def test_an_empty_place_takes_any(folders, tmp_path: Path) -> None:
    fresh, _ = folders
    assert offer(fresh, tmp_path / "nothing" / "here", {"overall": 0.0}, force=False)
    assert (tmp_path / "nothing" / "here" / "model.safetensors").read_text() == "new"
