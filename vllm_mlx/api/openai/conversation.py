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
from ..images import decode_image
from .schema import (
    AssistantMessage,
    ChatTool,
    ChatToolCall,
    FramesContent,
    ImageContent,
    ImageURL,
    RefusalContent,
    SystemMessage,
    TextContent,
    ToolMessage,
    UserMessage,
    VideoContent,
)
from .videos import decode_frames, decode_video

AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyPart = TextContent | RefusalContent | ImageContent | VideoContent | FramesContent


def decode_messages(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Order and whitespace are kept. A tool result takes the name of the latest call with its id."""
    tool_names: dict[str, str] = {}
    decoded = []
    for number, message in enumerate(messages):
        path = f"messages[{number}]."
        match message:
            case SystemMessage():
                decoded.append(_message("system", _parts(message.content, path), message.name))
            case UserMessage():
                decoded.append(_message("user", _parts(message.content, path), message.name))
            case AssistantMessage():
                calls = _tool_calls(message.tool_calls or ())
                tool_names.update((call.call_id, call.name) for call in calls)
                decoded.append(_message("assistant", (*_assistant_parts(message, path), *calls), message.name))
            case ToolMessage():
                name = tool_names.get(message.tool_call_id, message.name)
                result = ToolResultPart(message.tool_call_id, _parts(message.content, path), name)
                decoded.append(Message("tool", (result,)))
    return tuple(decoded)


def decode_tools(tools: Iterable[ChatTool]) -> tuple[ToolSpec, ...]:
    return tuple(
        ToolSpec(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
            param=f"tools[{number}].function.parameters",
        )
        for number, tool in enumerate(tools)
    )


def _message(role: Any, parts: Sequence[Part], name: str | None) -> Message:
    return Message(role, tuple(parts), name)


def _parts(content: str | Sequence[AnyPart] | None, path: str) -> tuple[ShownPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{path}content[{number}].") for number, part in enumerate(content))


def _part(part: AnyPart, path: str) -> ShownPart:
    match part:
        case TextContent(text=text) | RefusalContent(refusal=text):
            return TextPart(text)
        case ImageContent(image_url=image):
            return _image(image, path)
        case VideoContent():
            return decode_video(part, path)
        case FramesContent():
            return decode_frames(part, path)


def _image(image: ImageURL | str, path: str) -> ImagePart:
    """Some clients send the address itself where the object with the address belongs."""
    if isinstance(image, str):
        return decode_image(image, None, param=f"{path}image_url")
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


def _tool_calls(calls: Iterable[ChatToolCall]) -> list[ToolCallPart]:
    return [ToolCallPart(call.id, call.function.name, decode_arguments(call.function.arguments)) for call in calls]
