"""What a run of the tests prints: progress, failures as they happen, and what did not run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.sources import ROOT
from tests.support.progress import TimeLeft, duration, left_out

TESTS = """
import pytest

def test_passes():
    pass

def test_fails():
    assert [1, 2] == [1, 3]

@pytest.mark.skip(reason="no camera")
def test_is_skipped():
    pass

@pytest.mark.full
def test_is_long():
    pass
"""


def test_known_durations_and_the_pace_of_this_run_give_the_time_left() -> None:
    left = TimeLeft({"a": 1000.0, "b": 3000.0}, num_workers=2)
    left.plan(["a", "b", "new"])
    assert left.seconds(0) == 3000  # "new" counts as 2000 s, and two workers halve the sum.
    left.finish("a")
    assert (left.num_done, left.num_tests) == (1, 3)
    assert left.seconds(2000) == pytest.approx(10_000, rel=0.02)  # It took twice as long as it used to.
    left.finish("b")
    left.finish("new")
    assert left.seconds(9000) == 0


def test_what_did_not_run_is_one_line_with_its_reasons() -> None:
    assert left_out({}, {}) == ""
    line = left_out({"no camera": 2, "no GPU": 1}, {"full": 40})
    assert line == "Not run: 1 skipped (no GPU); 2 skipped (no camera); 40 left out (-m full runs them)."
    assert (duration(59.6), duration(125)) == ("1 min 0 s", "2 min 5 s")


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_run_names_its_failure_and_what_it_left_out(tmp_path: Path, num_workers: int) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -m 'not full'\nmarkers = full\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.support.progress import Progress\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Progress(config))\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:schemathesis", "-n", str(num_workers)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for cache in ([], ["-p", "no:cacheprovider"]):  # The first keeps durations, the second cannot.
        result = subprocess.run(
            [*command, *cache], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        lines = result.stdout.splitlines()
        assert result.returncode == 1, result.stdout + result.stderr
        assert lines.count("FAILED test_it.py::test_fails") == 1 and "FAILED test_it.py::test_fails - " in result.stdout
        assert "E       assert [1, 2] == [1, 3]" in lines
        assert "Not run: 1 skipped (no camera); 1 left out (-m full runs them)." in lines
        assert "1 failed, 1 passed, 1 skipped" in lines[-1]
