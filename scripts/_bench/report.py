"""Measured series as a table for people and as JSON for programs."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from scripts import markdown
from vllm_mlx import __version__

from .figures import OURS, Aim, Series, Spread

_FILE_WIDTH = 140
_COLUMNS = ("figure", "ours", "against", "theirs", "ratio (min … max)", "aim", "met")


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
