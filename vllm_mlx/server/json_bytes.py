"""JSON text → values: bounded before it is parsed, and with well-formed characters. Knows no HTTP.

A parser holds the interpreter's lock during its call, so everything that makes that call long is bounded first.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ..api.text import MAX_DEPTH, is_deeper
from ..core.errors import InvalidParameter

LARGE_BYTES = 64 * 1024
MAX_PARTS = 150_000
MAX_VALUES = 2_000_000  # enough for a million token ids
MAX_TEXT_BYTES = 16 * 1024 * 1024  # images and videos are plain ASCII, and longer

_DEEP = f"The request body is nested too deeply: it may have at most {MAX_DEPTH} levels."
_TOO_DEEP = "recursion limit exceeded"  # the parser's own message

_PIECE_BYTES = 64 * 1024  # the text is read in pieces, so that other threads get the lock in between
_ESCAPE_BYTES = 12  # the length of a surrogate pair, the longest escape
_ESCAPES_OF_TEXT = 24  # bytes per escape in texts; base64 with escaped slash and plus has more bytes per escape
_BEYOND_ASCII = re.compile(rb"\\u(?!00[0-7])")
_NO_ESCAPE = re.compile(rb"[^\\]{%d}" % _ESCAPE_BYTES)
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def read_json(text: bytes) -> Any:
    """Parse JSON like `json.loads`, but read half a surrogate pair as U+FFFD.

    Raises JSONDecodeError, and InvalidParameter for a text that exceeds a limit.
    """
    _check_text(text)
    _check_elements(text)
    value = _parse(text)
    if is_deeper(value, MAX_DEPTH):
        raise _refusal(_DEEP)
    return value


def _parse(text: bytes) -> Any:
    """Parse the text as UTF-8, the only encoding in which JSON is sent."""
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        return from_json(text, cache_strings="keys")
    except ValueError as error:
        message = str(error)  # not the error, since its traceback would keep the text in memory
    try:
        return from_json(_with_whole_pairs(text), cache_strings="keys")
    except ValueError:
        if message.startswith(_TOO_DEEP):
            raise _refusal(_DEEP) from None
        raise json.JSONDecodeError(message, "", 0) from None


def _with_whole_pairs(text: bytes) -> bytearray:
    """The text with U+FFFD for half a surrogate pair, which a client writes if it cuts a text inside an emoji."""
    whole, start = bytearray(text), 0
    for piece in _pieces(text):
        if rb"\ud" in piece or rb"\uD" in piece:
            # After this, an escaped backslash does not look like the beginning of another escape.
            for found in _HALF_PAIR.finditer(piece.replace(rb"\\", b"__")):
                whole[start + found.start() : start + found.end()] = rb"\ufffd"
        start += len(piece)
    return whole


def _check_text(text: bytes) -> None:
    """Bound the strings with escapes or non-ASCII characters: plain ASCII is parsed many times faster."""
    num_bytes, string = 0, _Stretch()
    for piece in _pieces(text):
        marks = piece.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in piece else piece
        start, end = marks.find(b'"'), marks.rfind(b'"')
        if start < 0:
            string = string.and_then(piece)
        else:
            num_bytes += string.and_then(piece[:start]).num_text_bytes
            num_bytes += _Stretch().and_then(piece[start:end]).num_text_bytes
            string = _Stretch().and_then(piece[end:])
        if num_bytes + string.num_text_bytes > MAX_TEXT_BYTES:
            raise _refusal(
                f"The request body has more than {MAX_TEXT_BYTES} bytes of text with escapes or with characters beyond "
                "ASCII, which is the maximum. Shorten the texts."
            )


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Text without a quote that begins or ends a string."""

    num_bytes: int = 0
    is_plain: bool = True

    def and_then(self, piece: bytes) -> "_Stretch":
        is_plain = piece.isascii() and (b"\\" not in piece or _has_few_escapes(piece))
        return _Stretch(self.num_bytes + len(piece), self.is_plain and is_plain)

    @property
    def num_text_bytes(self) -> int:
        return 0 if self.is_plain else self.num_bytes


def _has_few_escapes(piece: bytes) -> bool:
    """Whether the piece has few escapes, and none for a character beyond ASCII."""
    return piece.count(b"\\") * _ESCAPES_OF_TEXT <= len(piece) and not _BEYOND_ASCII.search(piece)


def _check_elements(text: bytes) -> None:
    if len(text) <= MAX_PARTS or _is_within(_most_marks(text)):  # an element takes at least a byte
        return
    counts = ((marks.count(b"["), marks.count(b"{"), num, marks.count(b",")) for marks, num in _structure(text))
    if not _is_within(counts):
        raise _refusal(
            f"The request body has more than {MAX_PARTS} objects, lists, texts and names of fields together, or "
            f"more than {MAX_VALUES} values, which are the maximums. Send fewer of them."
        )


def _is_within(counts: Iterable[tuple[int, ...]]) -> bool:
    """Whether the brackets of lists and objects, the quotes and the commas are within the limits, all pieces together.

    Every value except the first of its list or object follows a comma.
    """
    totals = [0, 0, 0, 0]
    for found in counts:
        totals = [before + more for before, more in zip(totals, found, strict=True)]
        num_lists, num_objects, num_quotes, num_commas = totals
        if num_lists + num_objects + num_quotes // 2 > MAX_PARTS or num_commas >= MAX_VALUES:
            return False
    return True


def _most_marks(text: bytes) -> Iterator[tuple[int, ...]]:
    """Count the marks of each piece, also those inside strings. Fast."""
    for start in range(0, len(text), _PIECE_BYTES):
        piece = text[start : start + _PIECE_BYTES]
        # Counting takes thirty times as long as searching, and images contain none of these marks.
        yield tuple(piece.count(mark) if mark in piece else 0 for mark in (b"[", b"{", b'"', b","))


def _structure(text: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield for each piece its brackets and commas outside of strings, and the number of quotes around strings."""
    in_string = 0
    for piece in _pieces(text):
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
        num_quotes = marks.count(b'"')
        yield b"".join(marks.split(b'"')[in_string::2]), num_quotes
        in_string = (in_string + num_quotes) % 2


def _pieces(text: bytes) -> Iterator[bytes]:
    """Pieces of the text that do not cut through an escape, unless the text exceeds the limit of escapes."""
    start = 0
    while start < len(text):
        end = _next_cut(text, start + _PIECE_BYTES)
        yield text[start:end]
        start = end


def _next_cut(text: bytes, at: int) -> int:
    end = min(len(text), at + MAX_TEXT_BYTES + _PIECE_BYTES)
    while at < end:
        if found := _NO_ESCAPE.search(text, at, at + _PIECE_BYTES):
            return found.end()
        at += _PIECE_BYTES - _ESCAPE_BYTES
    return end


def _refusal(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="request_too_large")
