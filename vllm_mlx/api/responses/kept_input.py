"""The input of a response as it is kept: wire items, each with an id. Made once, since a long one takes time."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema import InputItem


@dataclass(frozen=True, slots=True)
class KeptInput:
    items: tuple[Mapping[str, Any], ...] = ()
    num_bytes: int = 0


def kept_input(items: Sequence[InputItem], reply_id: str) -> KeptInput:
    unique = reply_id.removeprefix("resp_")
    kept = tuple(_with_id(item, f"in_{unique}{number:04}") for number, item in enumerate(items))
    return KeptInput(kept, sum(map(_num_bytes, kept)))


def _with_id(item: InputItem, item_id: str) -> dict[str, Any]:
    """The item with its own id, or with `item_id` if it has none."""
    given = item.model_dump(exclude_unset=True)
    own_id = given.pop("id", None)
    return {"id": own_id if isinstance(own_id, str) else item_id, **given, "type": item.type}


def _num_bytes(value: Any) -> int:
    """The memory that the value takes: small elements take many times their length as JSON."""
    match value:
        case dict():
            return sys.getsizeof(value) + sum(map(_num_bytes, value.values()))
        case list():
            return sys.getsizeof(value) + sum(map(_num_bytes, value))
        case _:
            return sys.getsizeof(value)
