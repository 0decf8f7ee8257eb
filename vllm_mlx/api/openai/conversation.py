"""Wire messages and tools → core values. Reads no parameters of generation."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...core.messages import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    ShownPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
)
from ..arguments import decode_arguments
from ..extras import check_extras
from ..images import decode_image
from .fields import MESSAGE_FIELDS, NO_FIELDS, PART_FIELDS, TOOL_CALL_FIELDS, TOOL_FIELDS
from .schema import (
    AssistantMessage,
    SystemMessage,
    ToolMessage,
    UserMessage,
    WireFrames,
    WireImage,
    WireImageURL,
    WireRefusal,
    WireText,
    WireTool,
    WireToolCall,
    WireVideo,
)
from .videos import decode_frames, decode_video

AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyPart = WireText | WireRefusal | WireImage | WireVideo | WireFrames


def decode_messages(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Order and whitespace are kept. A tool result takes the name of the latest call with its id."""
    tool_names: dict[str, str] = {}
    decoded = []
    for number, message in enumerate(messages):
        path = f"messages[{number}]."
        check_extras(message, MESSAGE_FIELDS, path)
        match message:
            case SystemMessage():
                decoded.append(_message("system", _parts(message.content, path), message.name))
            case UserMessage():
                decoded.append(_message("user", _parts(message.content, path), message.name))
            case AssistantMessage():
                calls = _tool_calls(message.tool_calls or (), path)
                tool_names.update((call.call_id, call.name) for call in calls)
                decoded.append(_message("assistant", (*_assistant_parts(message, path), *calls), message.name))
            case ToolMessage():
                name = tool_names.get(message.tool_call_id, message.name)
                result = ToolResultPart(message.tool_call_id, _parts(message.content, path), name)
                decoded.append(Message("tool", (result,)))
    return tuple(decoded)


def decode_tools(tools: Iterable[WireTool]) -> tuple[ToolSpec, ...]:
    specs = []
    for number, tool in enumerate(tools):
        path = f"tools[{number}]."
        check_extras(tool, TOOL_FIELDS, path)
        function = tool.function
        check_extras(function, NO_FIELDS, f"{path}function.")
        specs.append(
            ToolSpec(
                name=function.name,
                description=function.description,
                parameters=function.parameters,
                strict=bool(function.strict),
                param=f"{path}function.parameters",
            )
        )
    return tuple(specs)


def _message(role: Any, parts: Sequence[Part], name: str | None) -> Message:
    return Message(role, tuple(parts), name)


def _parts(content: str | Sequence[AnyPart] | None, path: str) -> tuple[ShownPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{path}content[{number}].") for number, part in enumerate(content))


def _part(part: AnyPart, path: str) -> ShownPart:
    check_extras(part, PART_FIELDS, path)
    match part:
        case WireText(text=text) | WireRefusal(refusal=text):
            return TextPart(text)
        case WireImage(image_url=image):
            return _image(image, path)
        case WireVideo():
            return decode_video(part, path)
        case WireFrames():
            return decode_frames(part, path)


def _image(image: WireImageURL | str, path: str) -> ImagePart:
    """Some clients send the address itself where the object with the address belongs."""
    if isinstance(image, str):
        return decode_image(image, None, param=f"{path}image_url")
    check_extras(image, NO_FIELDS, f"{path}image_url.")
    return decode_image(image.url, image.detail, param=f"{path}image_url")


def _assistant_parts(message: AssistantMessage, path: str) -> list[Part]:
    """Reasoning, then text. Both names of the reasoning are taken; a client that sends both sends one text twice."""
    parts: list[Part] = []
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        parts.append(ReasoningPart(reasoning))
    if message.content is None and message.refusal:
        parts.append(TextPart(message.refusal))
    return [*parts, *_parts(message.content, path)]


def _tool_calls(calls: Iterable[WireToolCall], path: str) -> list[ToolCallPart]:
    decoded = []
    for number, call in enumerate(calls):
        where = f"{path}tool_calls[{number}]."
        check_extras(call, TOOL_CALL_FIELDS, where)
        check_extras(call.function, NO_FIELDS, f"{where}function.")
        decoded.append(ToolCallPart(call.id, call.function.name, decode_arguments(call.function.arguments)))
    return decoded
