"""The samples of `/metrics` that the fields of a section of the status declare."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_mlx.core.figure import readings


def declared(section: type, values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the name of each sample, with the value of its own label if it has one, and its number."""
    for figure, value in readings(section, values):
        name = figure.name if figure.name.startswith("vllm:") else f"vllm_mlx_{figure.name}"
        name += "_total" if figure.kind == "counter" else ""
        yield from ((((name, key), number) for key, number in value.items()) if figure.label else [((name,), value)])
