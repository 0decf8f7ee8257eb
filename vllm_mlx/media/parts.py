"""Finds, replaces and names the images and videos of a request's messages. Reads none of them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


def numbered(parts: Iterable[MediaPart]) -> Iterator[tuple[int, MediaPart]]:
    """Parts with their numbers, counted from 1; images and videos are counted separately."""
    counts: Counter[type[MediaPart]] = Counter()
    for part in parts:
        counts[type(part)] += 1
        yield counts[type(part)], part


def located(error: InvalidImage, number: int, part: MediaPart) -> InvalidImage:
    """The error with the number, place and name of the image or video in front."""
    name, kind = ("Image", InvalidImage) if isinstance(part, ImagePart) else ("Video", InvalidVideo)
    where = f"{name} {number} of this request (`{part.param}`, {label(part.source)})"
    return kind(f"{where}: {error.message}", param=part.param)


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
