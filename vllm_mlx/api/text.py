"""Repairs texts of clients, reads JSON inside them, and packs (seals) reasoning into one string.

A client that cuts a string inside an emoji sends half a surrogate pair, which no tokenizer accepts. The server replaces
it when it parses a body, the Python API in its arguments. All other code trusts that texts are well formed.

Sealed reasoning is kept by a client that does not show it. It is not secret: anyone may unpack it.
"""

import base64
import binascii
import json
import zlib
from typing import Any

from ..core.errors import InvalidParameter
from ..util.json_values import is_deeper, with_texts

RAW_ARGUMENTS = "_raw"
CUSTOM_INPUT = "input"  # the argument that holds a custom tool's text
MAX_DEPTH = 128  # levels of nested objects and lists: the code that walks over them recurses

_SEALED = "vllm-mlx.1."
MAX_UNSEALED_BYTES = 16 * 1024 * 1024  # limit of one request, because a short word could unpack to all of the memory
MAX_RATIO = 16  # unpacked bytes for each byte that was sent; reasoning unpacks to three to ten
FREE_BYTES = 1024 * 1024  # always allowed, since reasoning that repeats itself is packed into a short word


def well_formed(text: str) -> str:
    """Return the text with every lone surrogate replaced by U+FFFD and every split pair joined."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def json_in(text: str) -> Any:
    """Parse a text as JSON. Raises ValueError if it is not JSON or nests too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("it nests too deep")
    return with_texts(value, well_formed) if r"\ud" in text or r"\uD" in text else value


def decode_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a past call as a dict, as templates read them.

    Clients send calls back that were cut off: text that is not a JSON object is kept under `RAW_ARGUMENTS`. Missing
    arguments are an empty dict.
    """
    if isinstance(text, dict):
        return text
    if text is None or not text.strip():
        return {}
    try:
        value = json_in(text)
    except ValueError:
        value = text
    if value is None:
        return {}
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: text}


def custom_input(arguments: str) -> str:
    """Return the text that a call of a custom tool carries; if the model wrote other arguments, all of their JSON."""
    text = decode_arguments(arguments).get(CUSTOM_INPUT)
    return text if isinstance(text, str) else arguments


def seal(text: str) -> str:
    return _SEALED + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def may_hold_sealed(body: bytes) -> bool:
    """Return whether a request's body may hold sealed words, which take time to unpack."""
    return _SEALED.encode() in body


class Unsealer:
    """Counts the unpacked bytes of one request."""

    def __init__(self) -> None:
        self._num_packed = 0
        self._num_unpacked = 0

    def unseal(self, word: str, param: str) -> str | None:
        """Return the unpacked text, or None if no server of this kind packed it.

        Raises InvalidParameter if all unpacked texts of the request together are too long.
        """
        if not word.startswith(_SEALED):
            return None
        try:
            packed = base64.urlsafe_b64decode(word.removeprefix(_SEALED))
            self._num_packed += len(packed)
            unpacked = zlib.decompressobj().decompress(packed, self._max_bytes - self._num_unpacked + 1)
            self._take(len(unpacked), param)
            return unpacked.decode()
        except (binascii.Error, zlib.error, ValueError):
            return None

    @property
    def _max_bytes(self) -> int:
        """Return the limit of bytes to which all words so far may unpack."""
        return min(MAX_UNSEALED_BYTES, max(FREE_BYTES, MAX_RATIO * self._num_packed))

    def _take(self, num_bytes: int, param: str) -> None:
        self._num_unpacked += num_bytes
        if self._num_unpacked > self._max_bytes:
            raise InvalidParameter(
                f"The sealed reasoning of this request is longer than {self._max_bytes} bytes, which is the maximum: "
                f"{MAX_RATIO} times the sent bytes, at least {FREE_BYTES} and at most {MAX_UNSEALED_BYTES} bytes. "
                "Leave out the reasoning of earlier turns.",
                param=param,
            )
