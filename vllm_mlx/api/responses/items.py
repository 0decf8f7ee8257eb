"""Input items → core messages. Ids of items are never read: they are new in every session."""

from collections.abc import Sequence
from typing import Any

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import ImagePart, Message, Part, ReasoningPart, Role, TextPart, ToolCallPart, ToolResultPart
from ..arguments import decode_arguments
from ..images import decode_image
from ..sealed import Unsealer
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
    """Neighbouring items of the assistant are one message, as they were one reply. Everything stays where it is."""
    builder = _Conversation()
    for number, item in enumerate(items):
        builder.add(item, f"{path}[{number}]")
    return builder.finish()


class _Conversation:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reply: list[Part] = []  # of the assistant, not yet a message
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
    """The text itself, else what we packed it into, else its summary, which from this server is the text too."""
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
