"""A response as it is stored: its input, its reply, and the response that it continues. Stores nothing itself."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from .replies import InputItemList, ResponseReply
from .schema import InputItem

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class KeptInput:
    """Input items as they are stored: wire items, each with an id. Made once, since a long input takes time."""

    items: tuple[Mapping[str, Any], ...] = ()
    num_bytes: int = 0


def kept_input(items: Sequence[InputItem], reply_id: str) -> KeptInput:
    unique = reply_id.removeprefix("resp_")
    kept = tuple(_with_id(item, f"in_{unique}{number:04}") for number, item in enumerate(items))
    return KeptInput(kept, sum(map(_num_bytes, kept)))


def _with_id(item: InputItem, item_id: str) -> dict[str, Any]:
    """Return the item with its own id, or with `item_id` if it has none or an invalid one."""
    given = item.model_dump(exclude_unset=True)
    own_id = given.pop("id", None)
    return {"id": own_id if isinstance(own_id, str) else item_id, **given, "type": item.type}


def _num_bytes(value: Any) -> int:
    """Return the memory that the value takes: small elements take many times their length as JSON."""
    match value:
        case dict():
            return sys.getsizeof(value) + sum(map(_num_bytes, value.values()))
        case list():
            return sys.getsizeof(value) + sum(map(_num_bytes, value))
        case _:
            return sys.getsizeof(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response with its input. `input` and `output` are wire items, each with an id."""

    reply: ResponseReply
    input: tuple[Mapping[str, Any], ...]
    previous_id: str | None
    num_bytes: int

    @property
    def response_id(self) -> str:
        return self.reply.id

    @property
    def output(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(item.model_dump(exclude_unset=True) for item in self.reply.output)

    def to_value(self) -> dict[str, Any]:
        """Return the response as JSON."""
        return {
            "reply": self.reply.model_dump(mode="json", exclude_unset=True),
            "input": self.input,
            "previous_id": self.previous_id,
            "num_bytes": self.num_bytes,
        }

    @classmethod
    def of_value(cls, value: dict[str, Any]) -> "StoredResponse":
        """Return the response that `to_value` turned into `value`. Raises ValueError or KeyError for anything else."""
        return cls(
            reply=ResponseReply.model_validate(value["reply"]),
            input=tuple(value["input"]),
            previous_id=value["previous_id"],
            num_bytes=value["num_bytes"],
        )


def stored(kept: KeptInput, reply: ResponseReply, previous_id: str | None) -> StoredResponse:
    num_bytes = len(reply.to_json()) + kept.num_bytes
    return StoredResponse(reply=reply, input=kept.items, previous_id=previous_id, num_bytes=num_bytes)


def as_input(items: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Return stored items as the input of another request."""
    return _ITEMS.validate_python([dict(item) for item in items])


def item_list(
    items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, newest_first: bool
) -> InputItemList:
    """Return one page of the items. If `after` names no item, the page begins with the first."""
    ordered = list(reversed(items)) if newest_first else list(items)
    ids = [item["id"] for item in ordered]
    start = ids.index(after) + 1 if after is not None and after in ids else 0
    page = [dict(item) for item in ordered[start : start + limit]]
    return InputItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(ordered),
    )
