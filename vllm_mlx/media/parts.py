"""The images and videos of a conversation, wherever they stand in it. Reads none of them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import InvalidImage, InvalidVideo
from ..core.messages import ImagePart, MediaPart, Message, ToolResultPart, VideoPart
from ..core.request import Request
from .sources import label


def media_parts(request: Request) -> tuple[MediaPart, ...]:
    """In the order in which templates show them; those inside tool results too."""
    return tuple(part for message in request.messages or () for part in _of_message(message))


def replace_media(request: Request, media: Mapping[MediaPart, MediaPart]) -> Request:
    """`media`: what is put in place of each."""
    messages = tuple(
        replace(message, parts=tuple(_replaced(part, media) for part in message.parts))
        for message in request.messages or ()
    )
    return replace(request, messages=messages)


def numbered(parts: Iterable[MediaPart]) -> Iterator[tuple[int, MediaPart]]:
    """Counted from 1, images and videos each on their own."""
    counts: Counter[type[MediaPart]] = Counter()
    for part in parts:
        counts[type(part)] += 1
        yield counts[type(part)], part


def located(error: InvalidImage, number: int, part: MediaPart) -> InvalidImage:
    """The same, with the number of the image or video in its request, its place and its name."""
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
