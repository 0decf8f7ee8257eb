"""JSON text → values: bounded before it is parsed, and with well-formed characters. Knows no HTTP.

A parser holds the interpreter's lock during its call, so everything that makes that call long is bounded first.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from ..api.text import MAX_DEPTH
from ..core.errors import InvalidParameter
from ..util.json_values import is_deeper

LARGE_BYTES = 64 * 1024
MAX_PARTS = 150_000
MAX_VALUES = 2_000_000  # enough for a million token ids
MAX_TEXT_BYTES = 16 * 1024 * 1024  # images and videos are plain ASCII, and longer

_DEEP = f"The request body is nested too deeply: it may have at most {MAX_DEPTH} levels."
_TOO_MANY = (
    f"The request body has more than {MAX_PARTS} objects, lists, texts and names of fields together, or more than "
    f"{MAX_VALUES} values, which are the maximums. Send fewer of them."
)
_TOO_DEEP = "recursion limit exceeded"  # the parser's own message

_PIECE_BYTES = 64 * 1024  # the text is read in pieces, so that other threads get the lock in between
_ESCAPE_BYTES = 12  # the length of a surrogate pair, the longest escape
_ESCAPES_OF_TEXT = 24  # bytes per escape in texts; base64 with escaped slash and plus has more bytes per escape
_OF_TEXT = re.compile(rb'\\u(?!00[0-7]|.{0,2}\Z)|\\"')  # escapes that base64 does not have
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def read_json(text: bytes) -> Any:
    """Parse JSON like `json.loads`, but read half a surrogate pair as U+FFFD.

    Raises JSONDecodeError, and InvalidParameter for a text that exceeds a limit.
    """
    _check(text)
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
    """Return the text with U+FFFD for half a surrogate pair, which clients write if they cut a text inside an emoji."""
    whole = bytearray(text)
    for start, end in _strings(text):
        if not _is_plain(text, start, end):
            # After this, an escaped backslash does not look like the beginning of another escape.
            for found in _HALF_PAIR.finditer(text[start:end].replace(rb"\\", b"__")):
                whole[start + found.start() : start + found.end()] = rb"\ufffd"
    return whole


def _check(text: bytes) -> None:
    """Bound the elements, and the strings that are not plain ASCII: plain ones are parsed many times faster."""
    if len(text) <= MAX_TEXT_BYTES and _is_within(_count(text, b'"') // 2, text):
        return
    between, num_text_bytes, last = [], 0, 0
    for start, end in _strings(text):
        between.append(text[last:start])
        last = end
        num_text_bytes += 0 if _is_plain(text, start, end) else end - start
        if num_text_bytes > MAX_TEXT_BYTES:
            raise _refusal(
                f"The request body has more than {MAX_TEXT_BYTES} bytes of text with escapes or with characters beyond "
                "ASCII, which is the maximum. Shorten the texts."
            )
        if len(between) > MAX_PARTS:
            raise _refusal(_TOO_MANY)
    if not _is_within(len(between), b"".join([*between, text[last:]])):
        raise _refusal(_TOO_MANY)


def _is_within(num_strings: int, marks: bytes) -> bool:
    """Return whether the elements are within the limits. `marks` has the brackets and commas of the text."""
    num_parts = num_strings + _count(marks, b"[") + _count(marks, b"{")
    return num_parts <= MAX_PARTS and _count(marks, b",") < MAX_VALUES  # the first value of a list follows no comma


def _strings(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield each string's begin and end, without its quotes. A string above the limit of text is cut there."""
    end = -1
    while (start := text.find(b'"', end + 1) + 1) > 0:
        end = text.find(b'"', start)
        if text[end - 1 : end] == b"\\":  # the quote may be escaped
            found = _STRING.match(text, start, start + MAX_TEXT_BYTES + 2)
            assert found is not None, "an empty string matches"
            end = found.end()
        end = len(text) if end < 0 else end
        yield start, end


def _is_plain(text: bytes, start: int, end: int) -> bool:
    """Return whether a string is ASCII with few escapes: none of a quote or of a character beyond ASCII."""
    for at in range(start, end, _PIECE_BYTES):
        piece = text[at : min(end, at + _PIECE_BYTES + _ESCAPE_BYTES)]
        if not piece.isascii():
            return False
        if b"\\" in piece and (_OF_TEXT.search(piece) or piece.count(b"\\") * _ESCAPES_OF_TEXT > len(piece)):
            return False
    return True


def _count(text: bytes, mark: bytes) -> int:
    return sum(text.count(mark, at, at + _PIECE_BYTES) for at in range(0, len(text), _PIECE_BYTES))


def _refusal(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="request_too_large")
