"""Wire messages and tools → core values. Does not read sampling parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...core.messages import (
    ImagePart,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    ShownPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    VideoPart,
)
from ...core.request import Request
from ...media.parts import media_parts, replace_media
from ..parameters import decode_image
from ..text import decode_arguments
from .schema import (
    AssistantMessage,
    ChatTool,
    ChatToolCall,
    FramesContent,
    ImageContent,
    ImageURL,
    ProcessorOptions,
    RefusalContent,
    SystemMessage,
    TextContent,
    ToolMessage,
    UserMessage,
    VideoContent,
)

AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyPart = TextContent | RefusalContent | ImageContent | VideoContent | FramesContent


def decode_messages(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Messages in their order, with their whitespace. A tool result has the name of the latest call with its id."""
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
            return _video(part, path)
        case FramesContent():
            return VideoPart(tuple(part.video), fps=part.fps, param=f"{path}video")


def _image(image: ImageURL | str, path: str) -> ImagePart:
    """Some clients send the address itself where the object with the address belongs."""
    if isinstance(image, str):
        return decode_image(image, None, param=f"{path}image_url")
    return decode_image(image.url, image.detail, param=f"{path}image_url")


def _assistant_parts(message: AssistantMessage, path: str) -> list[Part]:
    """Reasoning, then text. The reasoning has two names; a client that sends both sends the same text twice."""
    parts: list[Part] = []
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        parts.append(ReasoningPart(reasoning))
    if message.content is None and message.refusal:
        parts.append(TextPart(message.refusal))
    return [*parts, *_parts(message.content, path)]


def _tool_calls(calls: Iterable[ChatToolCall]) -> list[ToolCallPart]:
    return [ToolCallPart(call.id, call.function.name, decode_arguments(call.function.arguments)) for call in calls]


def _video(part: VideoContent, path: str) -> VideoPart:
    """Some clients send the address itself where the object with the address belongs."""
    video = part.video_url
    return VideoPart(video if isinstance(video, str) else video.url, fps=part.fps, param=f"{path}video_url")


def with_options(request: Request, options: ProcessorOptions | None) -> Request:
    """The frame rate that a request gives for all of its videos; a video may have its own."""
    if options is None:
        return request
    return replace_media(request, {part: _at(part, options.fps) for part in media_parts(request)})


def _at(part: MediaPart, fps: float | None) -> MediaPart:
    return replace(part, fps=fps) if isinstance(part, VideoPart) and part.fps is None else part
