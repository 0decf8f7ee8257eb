"""The figures of a workload set, their values run by run, and the aims for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

OURS = "vllm-mlx"
BARE = "bare loop"  # the model and mlx-lm's caches in this process: no server, no scheduler

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
