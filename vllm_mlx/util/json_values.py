"""Walks over JSON values, which hold objects, lists and texts inside each other."""

from collections.abc import Callable, Mapping
from typing import Any


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether JSON has more than `max_depth` levels. Looks level by level, so it does not recurse itself."""
    level = [value]
    for _ in range(max_depth + 1):
        inside = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not inside:
            return False
        level = [member for members in inside for member in members if isinstance(member, dict | list)]
    return True


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with every text in it changed, names of fields included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {with_texts(name, change): with_texts(member, change) for name, member in value.items()}
        case list() | tuple():
            return [with_texts(item, change) for item in value]
        case _:
            return value
