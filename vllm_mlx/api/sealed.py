"""Reasoning that a client keeps for us without showing it: packed into one word. No secret: anyone may unpack it."""

import base64
import binascii
import zlib

from ..core.errors import InvalidParameter

_PREFIX = "vllm-mlx.1."
MAX_UNSEALED_BYTES = 16 * 1024 * 1024  # limit of one request, because a short word could unpack to all of the memory
MAX_RATIO = 16  # bytes for each that was sent; reasoning in words unpacks to three to ten
FREE_BYTES = 1024 * 1024  # which reasoning that repeats itself may unpack to, however short its word


def seal(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def may_hold_sealed(body: bytes) -> bool:
    """Whether a request's body may hold such words, which take time to unpack."""
    return _PREFIX.encode() in body


class Unsealer:
    """Counts the unpacked bytes of one request."""

    def __init__(self) -> None:
        self._num_packed = 0
        self._num_unpacked = 0

    def unseal(self, word: str, param: str) -> str | None:
        """The text, or None for a word that is not ours. Raises InvalidParameter where all are too long together."""
        if not word.startswith(_PREFIX):
            return None
        try:
            packed = base64.urlsafe_b64decode(word.removeprefix(_PREFIX))
            self._num_packed += len(packed)
            unpacked = zlib.decompressobj().decompress(packed, self._max_bytes - self._num_unpacked + 1)
            self._take(len(unpacked), param)
            return unpacked.decode()
        except (binascii.Error, zlib.error, ValueError):
            return None

    @property
    def _max_bytes(self) -> int:
        """What all words up to now may unpack to."""
        return min(MAX_UNSEALED_BYTES, max(FREE_BYTES, MAX_RATIO * self._num_packed))

    def _take(self, num_bytes: int, param: str) -> None:
        self._num_unpacked += num_bytes
        if self._num_unpacked > self._max_bytes:
            raise InvalidParameter(
                f"The sealed reasoning of this request is longer than {self._max_bytes} bytes, which is the maximum: "
                f"{MAX_RATIO} times what was sent, at least {FREE_BYTES} and at most {MAX_UNSEALED_BYTES} bytes. "
                "Leave out the reasoning of earlier turns.",
                param=param,
            )
