"""The names that users were promised, by requirement: tests/promised_names.toml."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema

PROMISED: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[1] / "promised_names.toml").read_text(encoding="utf-8")
)


def promised(kind: str) -> Iterator[Any]:
    """Yield the names of one kind, of all requirements."""
    for names in PROMISED.values():
        yield from names.get(kind, ())


def check_types(values: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Raises ValidationError if a promised field is not there or has another JSON type."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    jsonschema.validate(dict(values), {"required": list(types), "properties": properties})
