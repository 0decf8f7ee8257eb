"""Copies a cache object of any class: its arrays, and everything else it keeps as JSON. It knows no layers.

The attributes of an object are its state. The libraries' own pairs of `state` and `from_state` are not used: some
classes lack one of the two, and mlx-vlm's ChunkedKVCache forgets its position in them.
"""

from collections.abc import Mapping, Sequence
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


def arrays(cache: Any) -> list[mx.array]:
    """Return the arrays of a cache object, each once. Anything that cannot be copied is left out."""
    found: dict[int, mx.array] = {}
    _collect(cache, found)
    return list(found.values())


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
    if _is_cache(value):
        return {"cache": type(value).__name__, "fields": _fields(value, found)}
    raise CannotCopy(f"{name} is of class {type(value).__name__}")


def _collect(value: Any, found: dict[int, mx.array]) -> None:
    if isinstance(value, mx.array):
        found.setdefault(id(value), value)
    elif type(value) in (list, tuple):
        for item in value:
            _collect(item, found)
    elif type(value) is dict:
        _collect(list(value.values()), found)
    elif _is_cache(value):
        _collect(vars(value), found)


def _is_cache(value: Any) -> bool:
    """Return whether this is an object with its own attributes: a model's parameters are not state."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (nn.Module, type))


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
