"""The images, videos and documents of a request: where they are in its messages, and where each comes from.

A source is bytes, a file of this machine, or a web address. Fetches and decodes nothing.
"""

import binascii
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ..core.errors import ConfigError, InvalidDocument, InvalidImage, InvalidVideo, setting
from ..core.messages import DocumentPart, ImagePart, MediaPart, Message, Part, ShownPart, ToolResultPart, VideoPart
from ..core.request import Request

Kind = Literal["image", "video", "document"]
VideoSource = str | bytes | tuple[str, ...]  # a file, or image files that are its frames
_EXAMPLES: Mapping[Kind, str] = {"image": "image/png", "video": "video/mp4", "document": "application/pdf"}
_MAX_BYTES: Mapping[Kind, str] = {
    "image": setting("max_image_bytes"),
    "video": setting("max_video_bytes"),
    "document": setting("max_document_bytes"),
}
_FRAMES = "data:video/jpeg;base64,"
_LABEL_CHARS = 80
_MAX_PATH_CHARS = 16_384  # escaped or not: file systems take less, and every part of a path costs a look-up
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
_PIECE_CHARS = 1 << 20  # characters of base64; a multiple of four
_SPACE = b"\t\n\f\r "
# Characters of base64 and white space as URLs escape them.
_ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%20": "", "%09": "", "%0A": "", "%0D": ""}
_MAX_ESCAPED_CHARS = 1 << 20  # data that is not base64 takes 150 bytes of memory for every byte while it is decoded

_NAMES: tuple[tuple[type, str, type[InvalidImage]], ...] = (
    (ImagePart, "Image", InvalidImage),
    (VideoPart, "Video", InvalidVideo),
    (DocumentPart, "Document", InvalidDocument),
)


def media_parts(request: Request) -> tuple[MediaPart, ...]:
    """Return all images and videos in the order of the conversation, including those in tool results."""
    return tuple(part for message in request.messages or () for part in _of_message(message, ImagePart | VideoPart))


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


def replace_parts(request: Request, new: Mapping[Any, Sequence[ShownPart]]) -> Request:
    """Return the request with each part that `new` names, also in tool results, replaced by the parts given there."""
    messages = tuple(replace(message, parts=tuple(_replaced(message.parts, new))) for message in request.messages or ())
    return replace(request, messages=messages)


def _replaced(parts: Iterable[Part], new: Mapping[Any, Sequence[ShownPart]]) -> Iterator[Any]:
    for part in parts:
        match part:
            case ToolResultPart(content=content):
                yield replace(part, content=tuple(_replaced(content, new)))
            case ImagePart(param=param) | VideoPart(param=param) | DocumentPart(param=param) if part in new:
                yield from (replace(item, param=param) if isinstance(item, ImagePart) else item for item in new[part])
            case _:
                yield part


@contextmanager
def naming(part: MediaPart | DocumentPart, number: int) -> Iterator[None]:
    """Add the number, the place and the name of a part to its errors, and raise them as the error of its kind."""
    try:
        yield
    except InvalidImage as error:
        [(name, kind)] = [(name, kind) for part_type, name, kind in _NAMES if isinstance(part, part_type)]
        where = f"{name} {number} of this request (`{part.param}`, {label(part.source)})"
        if isinstance(part, ImagePart) and part.is_page:
            where = f"A page of a document of this request (`{part.param}`)"
        raise kind(f"{where}: {error.message}", param=part.param) from error


def _of_message(message: Message, kind: Any) -> Iterator[Any]:
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            yield from (item for item in part.content if isinstance(item, kind))
        elif isinstance(part, kind):
            yield part


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes, or a data URL, which takes milliseconds a megabyte to decode."""

    source: str | bytes

    def read(self, max_bytes: int, kind: Kind = "image") -> bytes:
        if isinstance(self.source, bytes):
            check_bytes(len(self.source), max_bytes, kind)
            return self.source
        return _read_data_url(self.source, max_bytes, kind)


@dataclass(frozen=True, slots=True)
class Remote:
    url: str  # http or https; its parts are not checked yet


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: str  # absolute


Source = Inline | Remote | LocalFile


def parse_source(source: str | bytes, kind: Kind = "image") -> Source:
    """Raise InvalidImage for text that is neither a data URL, an address nor a path."""
    if isinstance(source, bytes):
        return Inline(source)
    head = source[:16].lstrip().lower()
    if head.startswith("data:"):
        return Inline(source)
    if head.startswith(("http:", "https:")):
        return Remote(source.strip())
    if head.startswith(("file:", "/")):
        if len(source) > _MAX_PATH_CHARS:
            raise InvalidImage(f"its path is longer than {_MAX_PATH_CHARS} characters.")
        return LocalFile(_file_path(source.strip()) if head.startswith("file:") else source.strip())
    example = f"data:{_EXAMPLES[kind]};base64,"
    raise InvalidImage(
        f"it is neither a data URL ({example}…) nor an address (https://…). Write `{example}` before bare base64."
    )


def count_frames(source: VideoSource) -> int | None:
    """Count the frames that `split_frames` returns, without making any. Returns None for a video file."""
    if isinstance(source, tuple):
        return len(source)
    return source.count(",", len(_FRAMES)) + 1 if _is_joined(source) else None


def split_frames(source: VideoSource) -> VideoSource:
    """Split `data:video/jpeg;base64,<frame>,<frame>…`, a video given as JPEGs. Other sources are returned unchanged."""
    if not _is_joined(source):
        return source
    return tuple(f"data:image/jpeg;base64,{frame}" for frame in source[len(_FRAMES) :].split(","))


def _is_joined(source: VideoSource) -> TypeGuard[str]:
    return isinstance(source, str) and source[: len(_FRAMES)].lower() == _FRAMES


def label(source: VideoSource) -> str:
    """Return a short name of the source for errors: enough to find it, never all of it."""
    if isinstance(source, tuple):
        return f"{len(source)} frames"
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    head = source[:_LABEL_CHARS].strip()
    if head.lower().startswith("data:"):
        return f"{head.partition(',')[0][:40]},…"
    return head + ("…" if len(source) > _LABEL_CHARS else "")


def check_bytes(num_bytes: int, max_bytes: int, kind: Kind = "image") -> None:
    if num_bytes > max_bytes:
        raise InvalidImage(
            f"it has {megabytes(num_bytes)}; this server takes {kind}s of at most {megabytes(max_bytes)} "
            f"({_MAX_BYTES[kind]}). Send a smaller one."
        )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes} bytes"


def _read_data_url(source: str, max_bytes: int, kind: Kind) -> bytes:
    """Decode a data URL (RFC 2397): `data:[<media type>][;base64],<data>`. The media type is ignored."""
    comma = source.find(",", 0, 1000)
    if comma < 0:
        raise InvalidImage("its data URL has no comma between its media type and its data.")
    is_base64 = source[:comma].rstrip().lower().endswith(";base64")
    # Four characters hold at least one byte, however they are escaped: refuse far too long ones before decoding.
    check_bytes((len(source) - comma) // 4, max_bytes, kind)
    data = _read_base64(source, comma + 1) if is_base64 else _read_escaped(source[comma + 1 :])
    check_bytes(len(data), max_bytes, kind)
    return data


def _read_base64(text: str, start: int) -> bytes:
    """Decode base64 as browsers do: white space and missing padding are accepted, other characters are not."""
    try:
        try:
            return _in_pieces(text, start)
        except binascii.Error:
            clean = _unescaped(text[start:]).encode("ascii").translate(None, _SPACE).rstrip(b"=")
            return _in_pieces(clean + b"=" * (-len(clean) % 4), 0)
    except ValueError as error:
        raise InvalidImage("its data URL is not valid base64.") from error


def _unescaped(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character).replace(escape.lower(), character)
    return text


def _read_escaped(text: str) -> bytes:
    if len(text) > _MAX_ESCAPED_CHARS:
        raise InvalidImage("its data URL is too long without base64. Send the data as base64, after `;base64,`.")
    return unquote_to_bytes(text)


def _in_pieces(text: str | bytes, start: int) -> bytes:
    """Decode piece by piece: decoding holds the interpreter lock, which the event loop needs."""
    pieces = (text[at : at + _PIECE_CHARS] for at in range(start, len(text), _PIECE_CHARS))
    return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])


def _file_path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidImage("it is not a valid file URL.") from error
    if parts.netloc not in ("", "localhost"):
        raise InvalidImage("its file URL names another machine. Write file:///path.")
    return unquote(parts.path)


class MediaRoot:
    """The folder whose files may be read; None for no file at all. Raises ConfigError if `root` is not a folder."""

    def __init__(self, root: str | None):
        self._root = None
        if root is not None:
            folder = Path(root).expanduser()
            if not folder.is_dir():
                raise ConfigError(f"{setting('media_root')} {root} is not a folder.")
            self._root = folder.resolve()

    def read(self, path: str, max_bytes: int, kind: Kind = "image") -> bytes:
        """Return the bytes of a file. Links that lead out of the folder are refused. Raises InvalidImage."""
        if self._root is None:
            raise InvalidImage(
                f"this server reads no files. Send a data URL, or start it with {setting('media_root')} FOLDER."
            )
        try:
            relative = Path(path).resolve(strict=True).relative_to(self._root)
            with os.fdopen(_open(self._root, relative.parts), "rb") as file:
                check_bytes(os.fstat(file.fileno()).st_size, max_bytes, kind)
                data = file.read(max_bytes + 1)
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError
            raise InvalidImage(f"there is no such file that can be read under {setting('media_root')}.") from error
        check_bytes(len(data), max_bytes, kind)
        return data


def _open(root: Path, parts: tuple[str, ...]) -> int:
    """Open a file folder by folder without following links, not even those made after the path was resolved."""
    if not parts:
        raise IsADirectoryError(str(root))
    folder = os.open(root, _FLAGS | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            folder, parent = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=folder), folder
            os.close(parent)
        file = os.open(parts[-1], _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("not a regular file")
    return file
