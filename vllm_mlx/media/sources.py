"""What the source of a picture or video is: its own bytes, an address, or a file. Fetches and opens nothing."""

import binascii
from dataclasses import dataclass
from typing import Literal, TypeGuard
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ..core.errors import InvalidImage, setting

Kind = Literal["image", "video"]
VideoSource = str | bytes | tuple[str, ...]  # frames
_FRAMES = "data:video/jpeg;base64,"
_SHOWN_CHARS = 80
_MAX_PATH_CHARS = 16_384  # of a file, escaped or not: no file system takes as many, and each part costs a look-up
_PIECE_CHARS = 1 << 20  # of base64; a multiple of four
_SPACE = b"\t\n\f\r "
# Of what base64 may hold, what URLs escape.
_ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%20": "", "%09": "", "%0A": "", "%0D": ""}
_MAX_ESCAPED_CHARS = 1 << 20  # of data that is not base64: a byte of it costs a hundred and fifty in memory, and time


@dataclass(frozen=True, slots=True)
class Inline:
    """`read` decodes it, which takes milliseconds for each megabyte."""

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


def parse_source(source: str | bytes) -> Source:
    """Raises InvalidImage for what is none of the three."""
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
    raise InvalidImage(
        "it is neither a data URL (data:image/png;base64,…) nor an address (https://…). Bare base64 wants "
        "`data:image/png;base64,` before it."
    )


def count_frames(source: VideoSource) -> int | None:
    """How many frames `split_frames` makes of it, counted without making any; None for a video file."""
    if isinstance(source, tuple):
        return len(source)
    return source.count(",", len(_FRAMES)) + 1 if _is_joined(source) else None


def split_frames(source: VideoSource) -> VideoSource:
    """`data:video/jpeg;base64,<frame>,<frame>…` is a video as JPEGs. Any other source is what it is."""
    if not _is_joined(source):
        return source
    return tuple(f"data:image/jpeg;base64,{frame}" for frame in source[len(_FRAMES) :].split(","))


def _is_joined(source: VideoSource) -> TypeGuard[str]:
    return isinstance(source, str) and source[: len(_FRAMES)].lower() == _FRAMES


def label(source: VideoSource) -> str:
    """What an error calls it: enough to find it by, never the whole of it."""
    if isinstance(source, tuple):
        return f"{len(source)} frames"
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    head = source[:_SHOWN_CHARS].strip()
    if head.lower().startswith("data:"):
        return f"{head.partition(',')[0][:40]},…"
    return head + ("…" if len(source) > _SHOWN_CHARS else "")


def check_bytes(num_bytes: int, max_bytes: int, kind: Kind = "image") -> None:
    if num_bytes > max_bytes:
        raise InvalidImage(
            f"it has {megabytes(num_bytes)}; this server takes {kind}s of at most {megabytes(max_bytes)} "
            f"({setting('max_image_bytes' if kind == 'image' else 'max_video_bytes')}). Send a smaller one."
        )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes} bytes"


def _read_data_url(source: str, max_bytes: int, kind: Kind) -> bytes:
    """RFC 2397: `data:[<media type>][;base64],<data>`. The media type is not read: the content decides."""
    comma = source.find(",", 0, 1000)
    if comma < 0:
        raise InvalidImage("its data URL has no comma between its media type and its data.")
    is_base64 = source[:comma].rstrip().lower().endswith(";base64")
    # Four characters write at least one byte, however they are escaped: what is far too long is not decoded first.
    check_bytes((len(source) - comma) // 4, max_bytes, kind)
    data = _read_base64(source, comma + 1) if is_base64 else _read_escaped(source[comma + 1 :])
    check_bytes(len(data), max_bytes, kind)
    return data


def _read_base64(text: str, start: int) -> bytes:
    """As browsers do: white space and missing padding are forgiven, other characters are not."""
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
        raise InvalidImage("its data URL is a long one without base64. Write `;base64,` and base64.")
    return unquote_to_bytes(text)


def _in_pieces(text: str | bytes, start: int) -> bytes:
    """Decoding holds the interpreter's lock, which the event loop wants back soon."""
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
