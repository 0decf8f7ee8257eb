"""Copies a cache object of any class: its arrays, and everything else it keeps as JSON. It knows no layers.

The attributes of an object are its state. The libraries' own pairs of `state` and `from_state` are not used: some
classes lack one of the two, and mlx-vlm's ChunkedKVCache forgets its position in them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Json = Any  # None, bool, int, float, str, and lists and dicts with keys of text of these


class CannotCopy(Exception):
    """An attribute is neither an array nor a number, a text, a container of these or a cache object."""


def take(cache: Any) -> tuple[list[mx.array], Json]:
    """Return the arrays of a cache object, each once and not copied, and everything else. Raises CannotCopy."""
    found: dict[int, mx.array] = {}
    fields = _fields(cache, found)
    return list(found.values()), fields


def is_foreign(value: Any) -> bool:
    """Return whether this is code or a part of a model: its parameters are no state."""
    return callable(value) or isinstance(value, nn.Module)


def arrays(held: Any, is_left_out: Callable[[Any], bool] = is_foreign) -> list[mx.array]:
    """Return the arrays that an object holds at any depth, each once. `is_left_out` tells which values to skip."""
    found: list[mx.array] = []
    seen: set[int] = set()
    pending: list[Any] = [held]
    while pending:
        value = pending.pop()
        if id(value) in seen or is_left_out(value):
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            pending += value
        else:
            pending += value.values() if isinstance(value, dict) else ()
            pending += getattr(value, "__dict__", {}).values()
    return found


def put(cache: Any, stored: Sequence[mx.array], fields: Json) -> None:
    """Give a new cache object the state that `take` has found in another object of the same model.

    Raises ValueError if the values do not fit such an object, which is unusable then.
    """
    own = vars(cache)
    if not isinstance(fields, dict) or not own.keys() <= fields.keys():
        raise ValueError(f"{type(cache).__name__} lacks attributes")
    for name, value in fields.items():
        own[name] = _value(value, own.get(name), stored)


def _fields(cache: Any, found: dict[int, mx.array]) -> Json:
    try:
        own: Mapping[str, Any] = vars(cache)
    except TypeError as error:  # it has slots
        raise CannotCopy(f"{type(cache).__name__} shows no attributes") from error
    return {name: _json(value, f"{type(cache).__name__}.{name}", found) for name, value in own.items()}


def _json(value: Any, name: str, found: dict[int, mx.array]) -> Json:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, mx.array):
        found.setdefault(id(value), value)
        return {"array": list(found).index(id(value))}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_json(item, name, found) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _json(item, name, found) for key, item in value.items()}}
    if hasattr(value, "__dict__") and not is_foreign(value):
        return {"cache": type(value).__name__, "fields": _fields(value, found)}
    raise CannotCopy(f"{name} is of class {type(value).__name__}")


def _value(stored: Json, current: Any, found: Sequence[mx.array]) -> Any:
    """Return the value that the JSON represents. `current`: the value in a new object; None if it has none."""
    if not isinstance(stored, dict):
        if stored is not None and current is not None and type(stored) is not type(current):
            raise ValueError(f"expected {type(current).__name__}, got {stored!r}")
        return stored
    match stored:
        case {"array": int(place)} if 0 <= place < len(found):
            return found[place]
        case {"list": list(items)}:
            return [_value(item, None, found) for item in items]
        case {"tuple": list(items)}:
            return tuple(_value(item, None, found) for item in items)
        case {"dict": dict(items)}:
            return {key: _value(item, None, found) for key, item in items.items()}
        case {"cache": name, "fields": fields} if type(current).__name__ == name:
            put(current, found, fields)
            return current
    raise ValueError(f"{stored!r} has no meaning")
