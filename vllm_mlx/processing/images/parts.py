"""The images of a conversation, wherever they stand in it. Reads none of them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...core.messages import ImagePart, Message, ToolResultPart
from ...core.request import Request


def image_parts(request: Request) -> tuple[ImagePart, ...]:
    """In the order in which templates show them; those inside tool results too."""
    return tuple(part for message in request.messages or () for part in _of_message(message))


def replace_images(request: Request, images: Mapping[ImagePart, ImagePart]) -> Request:
    """`images`: what is put in place of each."""
    messages = tuple(
        replace(message, parts=tuple(_replaced(part, images) for part in message.parts))
        for message in request.messages or ()
    )
    return replace(request, messages=messages)


def _replaced(part: Any, images: Mapping[ImagePart, ImagePart]) -> Any:
    match part:
        case ImagePart():
            return images[part]
        case ToolResultPart(content=content):
            return replace(part, content=tuple(_replaced(item, images) for item in content))
        case _:
            return part


def _of_message(message: Message) -> Iterable[ImagePart]:
    for part in message.parts:
        match part:
            case ImagePart():
                yield part
            case ToolResultPart(content=content):
                yield from (item for item in content if isinstance(item, ImagePart))
            case _:
                pass
