"""Input items → core messages, and as they are stored. Ids of items are not decoded: every session has new ones."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import ImagePart, Message, Part, ReasoningPart, Role, TextPart, ToolCallPart, ToolResultPart
from ..parameters import decode_image
from ..sealed import Unsealer
from ..text import decode_arguments
from .fields import SKIPPED_ITEMS
from .schema import (
    CallOutputItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    InputFile,
    InputImage,
    InputItem,
    InputText,
    ItemReference,
    MessageItem,
    OtherItem,
    ReasoningItem,
    RefusalPart,
)
from .tools import CUSTOM_INPUT, flat_name

_ROLES: dict[str, Role] = {"user": "user", "system": "system", "developer": "system"}


def decode_items(items: Sequence[InputItem], *, path: str = "input") -> list[Message]:
    """Messages in the order of the items. Neighbouring items of the assistant are one message: they were one reply."""
    builder = _Conversation()
    for number, item in enumerate(items):
        builder.add(item, f"{path}[{number}]")
    return builder.finish()


class _Conversation:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reply: list[Part] = []  # the assistant's parts that are no message yet
        self._names: dict[str, str] = {}
        self._unsealer = Unsealer()

    def add(self, item: InputItem, path: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._reply += _parts(item.content, f"{path}.content")
            case MessageItem():
                self._append(Message(_ROLES[item.role], _parts(item.content, f"{path}.content")))
            case ReasoningItem():
                self._reply += _reasoning(item, self._unsealer, path)
            case FunctionCallItem():
                self._call(item.call_id, flat_name(item.namespace, item.name), item.arguments)
            case CustomCallItem():
                self._call(item.call_id, item.name, {CUSTOM_INPUT: item.input})
            case CallOutputItem():
                result = ToolResultPart(
                    item.call_id, _parts(item.output, f"{path}.output"), self._names.get(item.call_id)
                )
                self._append(Message("tool", (result,)))
            case ItemReference(id=item_id):
                raise InvalidParameter(
                    f"`{path}`: no item `{shown(item_id)}` is stored. Send the item itself.", param=path
                )
            case OtherItem(type=kind):
                if kind not in SKIPPED_ITEMS:
                    raise Unsupported(f"`{path}.type` '{shown(kind)}' is not supported.", param=f"{path}.type")

    def finish(self) -> list[Message]:
        self._flush()
        return self._messages

    def _call(self, call_id: str, name: str, arguments: str | dict[str, Any] | None) -> None:
        self._names[call_id] = name
        self._reply.append(ToolCallPart(call_id, name, decode_arguments(arguments)))

    def _append(self, message: Message) -> None:
        self._flush()
        self._messages.append(message)

    def _flush(self) -> None:
        if self._reply:
            self._messages.append(Message("assistant", tuple(self._reply)))
            self._reply = []


def _reasoning(item: ReasoningItem, unsealer: Unsealer, path: str) -> list[Part]:
    """The text of the item, or its sealed text, or its summary, which this server fills with the text too."""
    text = "".join(part.text for part in item.content or ())
    text = (
        text
        or unsealer.unseal(item.encrypted_content or "", path)
        or "\n".join(part.text for part in item.summary or ())
    )
    return [ReasoningPart(text)] if text else []


def _parts(content: str | Sequence[ContentPart], path: str) -> tuple[TextPart | ImagePart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, path: str) -> TextPart | ImagePart:
    match part:
        case InputText(text=text) | RefusalPart(refusal=text):
            return TextPart(text)
        case InputImage(image_url=str(url), file_id=None, detail=detail):
            return decode_image(url, detail, param=f"{path}.image_url")
        case InputImage() | InputFile():
            raise Unsupported(
                f"`{path}`: this server keeps no files and reads no documents. Send text, or an `image_url`.",
                param=path,
            )


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
    """The item with its own id, or with `item_id` if it has none or an invalid one."""
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
