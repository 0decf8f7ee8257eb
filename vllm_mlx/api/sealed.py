"""Reasoning that a client keeps for us without showing it: packed into one word. No secret: anyone may unpack it."""

import base64
import binascii
import zlib

_PREFIX = "vllm-mlx.1."
_MAX_CHARS = 16 * 1024 * 1024  # of unpacked reasoning: a small word must not unpack to all of the memory


def seal(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def unseal(word: str) -> str | None:
    """The text, or None for a word that is not ours."""
    if not word.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(word.removeprefix(_PREFIX))
        return zlib.decompressobj().decompress(packed, _MAX_CHARS).decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
