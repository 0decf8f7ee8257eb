"""A response as it is stored: its input, its reply, and the response that it continues. Stores nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from .decode import DecodedResponse
from .replies import InputItemList, ResponseReply
from .schema import InputItem

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
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
    num_bytes = len(reply.to_json()) + decoded.kept.num_bytes
    return StoredResponse(reply=reply, input=decoded.kept.items, previous_id=previous_id, num_bytes=num_bytes)


def as_input(items: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Stored items as the input of another request."""
    return _ITEMS.validate_python([dict(item) for item in items])


def item_list(
    items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, newest_first: bool
) -> InputItemList:
    """One page of the items. If `after` names no item, the page begins with the first."""
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
