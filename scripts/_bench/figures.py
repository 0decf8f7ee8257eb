"""The figures of a workload set, their values run by run, the aims for them, and the report of what was measured."""

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from scripts import markdown
from scripts.served import free_port, our_command, running
from vllm_mlx import __version__

OURS = "vllm-mlx"
BARE = "bare loop"  # the model and mlx-lm's caches in this process: no server, no scheduler

_FILE_WIDTH = 140
_COLUMNS = ("figure", "ours", "against", "theirs", "ratio (min … max)", "aim", "met")

Measure = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A bound for the ratio of our value to another subject's, or, without one, for our value itself."""

    bound: float
    at_least: bool  # else: at most
    against: str | None = None

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def at_least(bound: float, against: str | None = None) -> Aim:
    return Aim(bound=bound, at_least=True, against=against)


def at_most(bound: float, against: str | None = None) -> Aim:
    return Aim(bound=bound, at_least=False, against=against)


@dataclass(frozen=True, slots=True)
class Rival:
    """The server that this one is compared with: mlx-lm's, or the one of another checkout of this repository."""

    name: str
    checkout: Path | None = None

    def command(self, model: Path, port: int) -> list[str]:
        if self.checkout is not None:
            return our_command(model, port)
        return [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]

    def aim(self, bound: float, *, at_least: bool) -> Aim:
        """Return an aim for the ratio of ours to theirs. `bound` is for mlx-lm's; a checkout may be better by 5 %."""
        if self.checkout is not None:
            bound = 0.95 if at_least else 1.05
        return Aim(bound=bound, at_least=at_least, against=self.name)


MLX_LM = Rival("mlx-lm server")


@contextmanager
def both_running(model: Path, rival: Rival) -> Iterator[dict[str, int]]:
    """Run this server and the other one during the block. Yields their ports."""
    ports = {OURS: free_port(), rival.name: free_port()}
    theirs = running(rival.command(model, ports[rival.name]), ports[rival.name], rival.checkout)
    with running(our_command(model, ports[OURS]), ports[OURS]), theirs:
        yield ports


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    unit: str
    measures: Mapping[str, Measure]  # subject → one measured value
    aims: tuple[Aim, ...] = ()


@dataclass(slots=True)
class Played:
    """Several figures of one subject: the first plays the load, the others are read from the last play."""

    values: dict[str, float] = field(default_factory=dict, init=False)  # by the figure's name

    def read(self, name: str) -> Measure:
        return lambda: self.values[name]


def read_off(name: str, unit: str, loads: Mapping[str, Played], *aims: Aim) -> Figure:
    """Return a figure that is read from the last play of each subject."""
    return Figure(name, unit, {subject: load.read(name) for subject, load in loads.items()}, aims)


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(slots=True)
class Series:
    """The values of one figure: for each subject one a run."""

    figure: Figure
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, subject: str, value: float) -> None:
        self.values.setdefault(subject, []).append(value)

    def spread(self, subject: str) -> Spread:
        return Spread.of(self.values[subject])

    def ratio(self, subject: str) -> Spread:
        """Ours to theirs, taken run by run, because a slow moment of the machine slows both sides of one run."""
        pairs = zip(self.values[OURS], self.values[subject], strict=True)
        return Spread.of([ours / theirs for ours, theirs in pairs])

    def result(self, aim: Aim) -> float:
        return self.spread(OURS).median if aim.against is None else self.ratio(aim.against).median


def measure(figures: list[Figure], *, num_runs: int, progress: Callable[[str], None]) -> list[Series]:
    """Measure every figure once a run, its subjects in turn, reversed in every second run. Run 0 is not counted."""
    series = [Series(figure) for figure in figures]
    for run in range(num_runs + 1):
        for one in series:
            subjects = list(one.figure.measures)
            for subject in subjects if run % 2 else reversed(subjects):
                progress(f"run {run} of {num_runs}: {one.figure.name}, {subject}")
                value = one.figure.measures[subject]()
                if run > 0:
                    one.add(subject, value)
    return series


def print_table(series: list[Series]) -> None:
    """Print the table in Markdown, as the docs show it."""
    rows = [_cells(one, aim) for one in series for aim in one.figure.aims or (None,)]
    markdown.output(_FILE_WIDTH).print(markdown.table(_COLUMNS, rows, left=("figure", "against", "met")))


def _cells(series: Series, aim: Aim | None) -> tuple[str, ...]:
    subject = None if aim is None else aim.against
    if subject is None:
        subject = next((name for name in series.values if name != OURS), None)
    unit = series.figure.unit
    measured = (series.figure.name, _value(series.spread(OURS).median, unit), *_against(series, subject))
    if aim is None:
        return (*measured, "", "")
    return (
        *measured,
        f"{'≥' if aim.at_least else '≤'} {_value(aim.bound, unit) if aim.against is None else f'{aim.bound:.2f}'}",
        "yes" if aim.is_met(series.result(aim)) else "no",
    )


def _against(series: Series, subject: str | None) -> tuple[str, str, str]:
    """Return the other subject, its value and the ratio. All are empty if only ours was measured."""
    if subject is None:
        return "", "", ""
    return subject, _value(series.spread(subject).median, series.figure.unit), _ratio(series.ratio(subject))


def _value(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.min:.2f} … {ratio.max:.2f})"


def to_json(series: list[Series], **facts: Any) -> dict[str, Any]:
    return {
        **facts,
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {"vllm-mlx": __version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
        "figures": [_figure_json(one) for one in series],
    }


def _figure_json(series: Series) -> dict[str, Any]:
    others = [subject for subject in series.values if subject != OURS]
    return {
        "name": series.figure.name,
        "unit": series.figure.unit,
        "values": series.values,
        "medians": {subject: series.spread(subject).median for subject in series.values},
        "ratios": {subject: asdict(series.ratio(subject)) for subject in others},
        "aims": [
            {
                "against": aim.against,
                "at_least" if aim.at_least else "at_most": aim.bound,
                "result": series.result(aim),
                "met": aim.is_met(series.result(aim)),
            }
            for aim in series.figure.aims
        ],
    }
