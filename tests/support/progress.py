"""Prints how far a test run is, how long it will still take, and what it skipped and why.

The estimate uses the duration of every test in its last run, which pytest's cache keeps in `.pytest_cache`. It replaces
pytest's dots, unless pytest is asked for more words than pyproject.toml asks for (`-v`). Under pytest-xdist the
controller prints, and its workers report what they left out.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

_KEY = "durations"  # The name in pytest's cache: seconds by node id.
_LEFT_OUT = "left_out"  # The name in a worker's output: tests by the marker that leaves them out.
_MARKERS = ("full", "browser")
_TERMINAL_INTERVAL_S = 0.5  # A terminal shows one line, which is rewritten.
_FILE_INTERVAL_S = 20.0  # Elsewhere, as in a log file, lines stay.
_PRIOR_S = 10.0  # Estimated seconds of test time after which the measured speed outweighs the assumed one.


class TimeLeft:
    """Estimates the rest of a run from known durations, corrected by how fast this run is. Knows no clock.

    A test without a known duration counts as an average one, and as one second where nothing is known.
    """

    def __init__(self, known_s: Mapping[str, float], num_workers: int) -> None:
        self._known_s = known_s
        self._num_workers = num_workers
        self.average_s = sum(known_s.values()) / len(known_s) if known_s else 1.0
        self._left: dict[str, float] = {}
        self._done_s = 0.0
        self.num_tests = 0

    def plan(self, names: Iterable[str]) -> None:
        self._left = {name: self._known_s.get(name, self.average_s) for name in names}
        self.num_tests = len(self._left)

    def finish(self, name: str) -> None:
        self._done_s += self._left.pop(name, 0.0)

    @property
    def num_done(self) -> int:
        return self.num_tests - len(self._left)

    def seconds(self, elapsed_s: float) -> float:
        """Seconds until the last test ends, after `elapsed_s` seconds of testing."""
        pace = (elapsed_s + _PRIOR_S / self._num_workers) / (self._done_s + _PRIOR_S)
        return sum(self._left.values()) * pace


class Progress:
    """A pytest plugin for one run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker_output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._cache: pytest.Cache | None = getattr(config, "cache", None)  # None with `-p no:cacheprovider`
        self._known_s: dict[str, float] = self._cache.get(_KEY, {}) if self._cache else {}
        self._time_left = TimeLeft(self._known_s, getattr(config.option, "numprocesses", None) or 1)
        self._took_s: dict[str, float] = defaultdict(float)
        self._num_failed = 0
        self._skipped: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._started_s = self._printed_s = time.monotonic()

    @property
    def _is_printing(self) -> bool:
        return self._worker_output is None and int(self._config.option.verbose) < 0

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Begins a run on several workers with the longest files, so that all workers end at about the same time.

        In a new checkout, where nothing is known, those are the files with the most tests.
        """
        if self._worker_output is None:
            return
        files_s: dict[str, float] = defaultdict(float)
        for item in items:
            files_s[file_of(item.nodeid)] += self._known_s.get(item.nodeid, self._time_left.average_s)
        items.sort(key=lambda item: -files_s[file_of(item.nodeid)])

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._left_out.update(name for item in items for name in _MARKERS if item.get_closest_marker(name))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # A controller has none.
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self._time_left.num_tests:
            self._begin(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker leaves out the same tests, so one worker's report is enough."""
        self._left_out = Counter(getattr(node, "workeroutput", {}).get(_LEFT_OUT, self._left_out))

    def _begin(self, names: Sequence[str]) -> None:
        self._time_left.plan(names)
        self._started_s = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Counts a test for pytest's summary without a dot."""
        if not self._is_printing or hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        return (report.outcome, "", "") if report.when == "call" or report.skipped else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid] += report.duration
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.failed:
            self._num_failed += 1
            self._print_failure(report)
        if report.when == "teardown":
            self._time_left.finish(report.nodeid)
            self._print_progress()

    def _print_failure(self, report: pytest.TestReport) -> None:
        if self._is_printing:
            self._write(
                f"FAILED {report.nodeid}{'' if report.when == 'call' else f' ({report.when})'}", is_lasting=True
            )

    def _print_progress(self) -> None:
        now_s = time.monotonic()
        interval_s = _TERMINAL_INTERVAL_S if self._terminal.isatty else _FILE_INTERVAL_S
        if not self._is_printing or now_s - self._printed_s < interval_s:
            return
        self._printed_s = now_s
        done, total = self._time_left.num_done, self._time_left.num_tests
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        left = duration(self._time_left.seconds(now_s - self._started_s))
        self._write(f"{done} of {total} tests{failed}, about {left} left", is_lasting=not self._terminal.isatty)

    def _write(self, line: str, *, is_lasting: bool) -> None:
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.write(line)
        if is_lasting:
            self._terminal.write_line("")

    def pytest_terminal_summary(self) -> None:
        if line := left_out(self._skipped, self._left_out):
            self._terminal.write_line(line)

    def pytest_sessionfinish(self) -> None:
        if self._worker_output is not None:
            self._worker_output[_LEFT_OUT] = dict(self._left_out)
            return
        if self._is_printing and self._terminal.isatty:
            self._terminal.rewrite("", erase=True)
        if self._cache and self._took_s:
            self._cache.set(_KEY, self._known_s | {name: round(took, 3) for name, took in self._took_s.items()})


def file_of(name: str) -> str:
    """The file that a node id begins with."""
    return name.partition("::")[0]


def left_out(skipped: Mapping[str, int], deselected: Mapping[str, int]) -> str:
    """One line on the tests that did not run, with the reasons; empty if all ran."""
    parts = [f"{number} skipped ({reason})" for reason, number in sorted(skipped.items())]
    parts += [f"{number} left out (-m {name} runs them)" for name, number in sorted(deselected.items())]
    return f"Not run: {'; '.join(parts)}." if parts else ""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
