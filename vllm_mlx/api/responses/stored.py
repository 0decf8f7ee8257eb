"""A response as it is kept: what was asked, what was replied, and what it goes on from. Keeps nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from .decode import DecodedResponse
from .replies import InputItemList, ResponseReply
from .schema import WireItem

_ITEMS: TypeAdapter[list[WireItem]] = TypeAdapter(list[WireItem])
MAX_LISTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`input` and `output` are wire items, each with an id."""

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


def stored(decoded: DecodedResponse, reply: ResponseReply, previous_id: str | None) -> StoredResponse:
    unique = reply.id.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    for number, item in enumerate(decoded.items):
        given = item.model_dump(exclude_unset=True)
        if not isinstance(given.get("id"), str):
            given["id"] = f"in_{unique}{number:04}"
        items.append({"id": given["id"], **given, "type": item.type})
    num_bytes = len(reply.to_json()) + sum(map(_num_bytes, items))
    return StoredResponse(reply=reply, input=tuple(items), previous_id=previous_id, num_bytes=num_bytes)


def _num_bytes(value: Any) -> int:
    """About what it is as JSON, which images make too long to write for this."""
    match value:
        case dict():
            return sum(_num_bytes(key) + _num_bytes(each) + 2 for key, each in value.items()) + 2
        case list():
            return sum(_num_bytes(each) + 1 for each in value) + 2
        case str():
            return len(value) + 2
        case _:
            return 8


def as_input(items: Sequence[Mapping[str, Any]]) -> list[WireItem]:
    """Stored items as the input of a next request."""
    return _ITEMS.validate_python([dict(item) for item in items])


def item_list(
    items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, newest_first: bool
) -> InputItemList:
    """One page. An `after` that names no item starts from the first."""
    ordered = list(reversed(items)) if newest_first else list(items)
    ids = [item["id"] for item in ordered]
    start = ids.index(after) + 1 if after is not None and after in ids else 0
    page = [dict(item) for item in ordered[start : start + limit]]
    return InputItemList(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(ordered),
    )
