"""A figure: a field of the status that is a metric too, declared as in `Annotated[int, counter("hits", "Hits.")]`.

`engine/monitoring/prometheus.py` gives the metrics their order.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_type_hints


class Figure(NamedTuple):
    """A metric: its kind, its name with the unit at the end, its help text, and the label that divides a mapping.

    A metric that vLLM has too begins with `vllm:`. `/metrics` puts our own prefix before the others.
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    name: str
    help: str
    label: str = ""


def counter(name: str, help: str, label: str = "") -> Figure:
    return Figure("counter", name, help, label)


def gauge(name: str, help: str, label: str = "") -> Figure:
    return Figure("gauge", name, help, label)


@cache
def _figures(section: type) -> dict[str, Figure]:
    hints = get_type_hints(section, include_extras=True).items()
    found = ((name, each) for name, hint in hints for each in getattr(hint, "__metadata__", ()))
    return {name: each for name, each in found if isinstance(each, Figure)}


def readings(section: type, values: object, *names: str) -> Iterator[tuple[Figure, Any]]:
    """Yield the figures of a dataclass or TypedDict and their values: of the fields with these names, or of all."""
    for name in names or _figures(section):
        yield _figures(section)[name], values[name] if isinstance(values, Mapping) else getattr(values, name)
