"""Finds, replaces and names the images, videos and documents of a request's messages. Reads none of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core.errors import InvalidDocument, InvalidImage, InvalidVideo
from ..core.messages import DocumentPart, ImagePart, MediaPart, Message, Part, ShownPart, ToolResultPart, VideoPart
from ..core.request import Request
from .sources import label


def media_parts(request: Request) -> tuple[MediaPart, ...]:
    """All images and videos in the order of the conversation, those in tool results included."""
    return tuple(part for message in request.messages or () for part in _of_message(message, ImagePart | VideoPart))


def replace_media(request: Request, media: Mapping[MediaPart, MediaPart]) -> Request:
    """The request with every image and video replaced as `media` says."""
    messages = tuple(
        replace(message, parts=tuple(_replaced(part, media) for part in message.parts))
        for message in request.messages or ()
    )
    return replace(request, messages=messages)


def document_parts(request: Request) -> dict[DocumentPart, bool]:
    """Return every document once, in the order of the conversation, and whether the request depends on it.

    It does if the user has just sent it. A document before the last reply, from a tool, or sent together with the
    result of a tool must not end the conversation if it cannot be read.
    """
    messages = request.messages or ()
    roles = [message.role for message in messages]
    start = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    is_sent_now = "tool" not in roles[start:]
    found: dict[DocumentPart, bool] = {}
    for index, message in enumerate(messages):
        for part in _of_message(message, DocumentPart):
            found[part] = found.get(part, False) or (is_sent_now and index >= start)
    return found


def replace_documents(request: Request, read: Mapping[DocumentPart, Sequence[ShownPart]]) -> Request:
    """Return the request with each document replaced by the parts that were read from it."""
    messages = tuple(
        replace(message, parts=tuple(_read_parts(message.parts, read))) for message in request.messages or ()
    )
    return replace(request, messages=messages)


def _read_parts(parts: Iterable[Part], read: Mapping[DocumentPart, Sequence[ShownPart]]) -> Iterator[Any]:
    for part in parts:
        match part:
            case DocumentPart(param=param):
                yield from (replace(new, param=param) if isinstance(new, ImagePart) else new for new in read[part])
            case ToolResultPart(content=content):
                yield replace(part, content=tuple(_read_parts(content, read)))
            case _:
                yield part


_NAMES: tuple[tuple[type, str, type[InvalidImage]], ...] = (
    (ImagePart, "Image", InvalidImage),
    (VideoPart, "Video", InvalidVideo),
    (DocumentPart, "Document", InvalidDocument),
)


@contextmanager
def naming(part: MediaPart | DocumentPart, number: int) -> Iterator[None]:
    """Add the number, the place and the name of a part to its errors. Raises InvalidImage, or the error of its kind."""
    try:
        yield
    except InvalidImage as error:
        [(name, kind)] = [(name, kind) for part_type, name, kind in _NAMES if isinstance(part, part_type)]
        where = f"{name} {number} of this request (`{part.param}`, {label(part.source)})"
        if isinstance(part, ImagePart) and part.is_page:
            where = f"A page of a document of this request (`{part.param}`)"
        raise kind(f"{where}: {error.message}", param=part.param) from error


def _replaced(part: Any, media: Mapping[MediaPart, MediaPart]) -> Any:
    match part:
        case ImagePart() | VideoPart():
            return media[part]
        case ToolResultPart(content=content):
            return replace(part, content=tuple(_replaced(item, media) for item in content))
        case _:
            return part


def _of_message(message: Message, kind: Any) -> Iterator[Any]:
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            yield from (item for item in part.content if isinstance(item, kind))
        elif isinstance(part, kind):
            yield part
