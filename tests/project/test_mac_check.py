"""The checks of a Mac, as far as another machine can show: what is read, what is resumed, and that they run."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts._mac import progress
from scripts._mac.checks import SMALL, MacChecks
from scripts._mac.progress import Check, Outcome, Progress, Result
from tests.project.sources import ROOT

OUTPUTS = Path(__file__).parent / "mac_outputs"
PASSED = Result(Outcome.PASS, "well")


def output(name: str) -> str:
    return (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts._mac", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=800, check=False
    )


def test_outputs_of_macos_tools_are_read() -> None:
    assert progress.parse_footprint(output("footprint")) == progress.Footprint(5637144576, 1204)
    memory = progress.parse_vm_stat(output("vm_stat"))
    assert memory == progress.VirtualMemory(16384 * 400018, 16384 * 895976)
    assert progress.parse_boot_time(output("boottime")) == 1764012345
    assert progress.parse_power(output("pmset")) == "Battery Power"


def test_what_is_no_output_of_theirs_is_read_as_nothing() -> None:
    for text in ("", "footprint: no such process\n", "Pages free: 3."):
        assert progress.parse_footprint(text) is None
        assert progress.parse_vm_stat(text) is None
        assert progress.parse_boot_time(text) is None
        assert progress.parse_power(text) is None


class Interrupted(BaseException):
    """As if the process, or the machine, ended here."""


def interrupt() -> Result:
    raise Interrupted


def run(file: Path, *checks: Check) -> dict[str, Result]:
    progress = Progress(file)
    progress.run(checks, has_metal=False, say=lambda text: None)
    return progress.results


@pytest.mark.parametrize(
    ("is_risky", "has_restarted", "words"),
    [
        (False, False, None),
        (True, False, "The last run ended in this check"),
        (True, True, "The machine restarted"),
        (False, True, "The machine restarted"),
    ],
)
def test_a_run_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_risky: bool, has_restarted: bool, words: str | None
) -> None:
    file, ran = tmp_path / "results.json", list[str]()

    def note(name: str) -> Result:
        ran.append(name)
        return PASSED

    first = Check("first", "It passes.", 1, lambda: note("first"))
    last = Check("last", "It passes.", 1, lambda: note("last"))
    with pytest.raises(Interrupted):
        run(file, first, Check("second", "It ends all.", 1, interrupt, is_risky=is_risky), last)
    if has_restarted:
        monkeypatch.setattr(progress, "boot_time", lambda: 17)
    second = Check("second", "It passes.", 1, lambda: note("second"), is_risky=is_risky)
    results = run(file, first, second, last)
    assert ran == ["first", "last"] if words else ["first", "second", "last"]
    assert results["second"].outcome is (Outcome.FAIL if words else Outcome.PASS)
    assert words is None or words in results["second"].text
    assert run(file, first, second, last) == results and len(ran) == len(results) - bool(words)


def test_a_check_that_breaks_ends_no_other(tmp_path: Path) -> None:
    def broken() -> Result:
        raise ValueError("no such model")

    results = run(
        tmp_path / "results.json",
        Check("broken", "It breaks.", 1, broken),
        Check("metal", "It needs Metal.", 1, broken, needs_metal=True),
        Check("well", "It passes.", 1, lambda: PASSED),
    )
    assert (results["broken"].outcome, results["broken"].text) == (Outcome.FAIL, "ValueError: no such model")
    assert results["metal"].outcome is Outcome.SKIPPED
    assert results["well"].outcome is Outcome.PASS


def test_a_report_holds_no_name_of_a_user_or_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/ann"))
    found = Result(Outcome.FAIL, "no file /Users/ann/model | 1\n2")
    text = progress.report({"a": found}, {"model": "/Users/ann/model"}, ["Close the lid."])
    assert "| a | fail | no file ~/model / 1 2 | 0 s |" in text
    assert "| model | ~/model |" in text and "- Close the lid." in text
    assert "ann" not in text


def test_a_dry_run_names_every_check_and_writes_nothing(tmp_path: Path) -> None:
    printed = command("--dry-run", "--folder", str(tmp_path / "state")).stdout
    checks = MacChecks(model="demo", vision_model="demo", bf16_model="demo", sizes=SMALL, log=tmp_path / "log").all()
    assert [line.split()[0] for line in printed.splitlines()[:-1]] == [check.name for check in checks]
    assert not (tmp_path / "state").exists()


def test_the_experiment_about_wiring_asks_first(tmp_path: Path) -> None:
    result = command("--wiring", "--folder", str(tmp_path))
    assert result.returncode == 1
    assert "This may restart the Mac" in result.stdout and "--yes" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_checks_run_and_are_reported(tmp_path: Path) -> None:
    result = command("--small", "--only", "setup,speed", "--folder", str(tmp_path))
    assert result.returncode == 0, result.stdout
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| setup | " in report and "| mlx | " in report and "### By hand" in report
    assert "[1/2] setup" in result.stdout and "min left" in result.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_check_that_serves_a_model_runs(tmp_path: Path) -> None:
    names = "refusal,bf16,repeats,memory,long-prompt,stalls,mixed,buffers,stopped,rest,end"
    result = command("--small", "--model", "demo", "--only", names, "--folder", str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert command("--wiring", "--yes", "--minutes", "0.3", "--folder", str(tmp_path)).returncode == 0
