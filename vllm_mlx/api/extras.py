"""Fields that a wire type does not name: taken, refused or unknown, by a protocol's own table. Knows no protocol.

A null is always taken: it means the field was left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ..core.errors import Unsupported, shown

ANY = object()  # every value is harmless


@dataclass(frozen=True, slots=True)
class Ignored:
    """Values that change nothing in a right reply, and why."""

    reason: str
    values: tuple[Any, ...] = (ANY,)
    otherwise: str = ""  # what to do about any other value


@dataclass(frozen=True, slots=True)
class Refused:
    advice: str


def check_extras(wire: BaseModel, table: Mapping[str, Ignored | Refused], path: str = "") -> None:
    """Raises Unsupported for the first extra field of `wire` that cannot be ignored."""
    for name, value in _given(wire):
        rule = table.get(name)
        where = path + shown(name)
        match rule:
            case Ignored(values=values) if ANY in values or any(_same(value, each) for each in values):
                continue
            case Ignored(otherwise=advice) | Refused(advice=advice):
                raise Unsupported(f"`{where}` is not supported with this value. {advice}", param=where)
            case None:
                raise Unsupported(f"Unknown parameter: `{where}`. Leave it out.", param=where, code="unknown_parameter")


def _given(wire: BaseModel) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in (wire.model_extra or {}).items() if value is not None)


def _same(left: Any, right: Any) -> bool:
    """Equality that keeps booleans and numbers apart."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
