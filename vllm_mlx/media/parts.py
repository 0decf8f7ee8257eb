"""Finds, replaces and names the images and videos of a request's messages. Reads none of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core.errors import InvalidImage, InvalidVideo
from ..core.messages import ImagePart, MediaPart, Message, ToolResultPart, VideoPart
from ..core.request import Request
from .sources import label


def media_parts(request: Request) -> tuple[MediaPart, ...]:
    """All images and videos in the order of the conversation, those in tool results included."""
    return tuple(part for message in request.messages or () for part in _of_message(message))


def replace_media(request: Request, media: Mapping[MediaPart, MediaPart]) -> Request:
    """The request with every image and video replaced as `media` says."""
    messages = tuple(
        replace(message, parts=tuple(_replaced(part, media) for part in message.parts))
        for message in request.messages or ()
    )
    return replace(request, messages=messages)


@contextmanager
def naming(part: MediaPart, number: int) -> Iterator[None]:
    """Errors of an image or a video get its number, place and name in front. Raises InvalidImage or InvalidVideo."""
    try:
        yield
    except InvalidImage as error:
        name, kind = ("Image", InvalidImage) if isinstance(part, ImagePart) else ("Video", InvalidVideo)
        where = f"{name} {number} of this request (`{part.param}`, {label(part.source)})"
        raise kind(f"{where}: {error.message}", param=part.param) from error


def _replaced(part: Any, media: Mapping[MediaPart, MediaPart]) -> Any:
    match part:
        case ImagePart() | VideoPart():
            return media[part]
        case ToolResultPart(content=content):
            return replace(part, content=tuple(_replaced(item, media) for item in content))
        case _:
            return part


def _of_message(message: Message) -> Iterable[MediaPart]:
    for part in message.parts:
        match part:
            case ImagePart() | VideoPart():
                yield part
            case ToolResultPart(content=content):
                yield from (item for item in content if isinstance(item, ImagePart | VideoPart))
            case _:
                pass
