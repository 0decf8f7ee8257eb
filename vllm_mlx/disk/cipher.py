"""AES-256-GCM with a key from a file: nobody without the key reads records, or changes them unnoticed.

It is for folders on a disk that others use too. Who can read the memory or the key file of the server's user reads
everything.
"""

import base64
import binascii
import hashlib
import os
import re
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..core.errors import ConfigError, setting

_KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_MAX_FILE_BYTES = 256


class Cipher:
    """Each seal has a nonce of its own, drawn at random: after 2^32 seals, two are equal with a chance of 2^-33."""

    OVERHEAD = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes):
        assert len(key) == _KEY_BYTES
        self._aead = AESGCM(_derived(key, b"data"))
        self.name_key = _derived(key, b"names")
        self.key_id = _derived(key, b"id")[:8].hex()  # tells files of this key from others, and nothing about it

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The key is 32 random bytes, or their hex or base64. Raises ConfigError."""
        flag = setting("cache_disk_key_file")
        try:
            with path.open("rb") as file:
                mode, content = os.fstat(file.fileno()).st_mode, file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{flag}: {path} cannot be read ({error.strerror}). "
                f"`(umask 077; openssl rand -hex 32 > {path})` makes a key; keep a copy of it."
            ) from error
        if mode & 0o077:
            raise ConfigError(f"{flag}: others may read or change {path}. Run `chmod 600 {path}`.")
        if (key := _decoded(content)) is None:
            raise ConfigError(
                f"{flag}: {path} holds no key of {_KEY_BYTES} bytes, as they are, in hex or in base64. "
                "`openssl rand -hex 32` prints one."
            )
        return cls(key)

    def seal(self, data: bytes | memoryview, context: bytes) -> bytes:
        """Encrypt. The result has OVERHEAD more bytes, and opens with the same context only."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, context)

    def open(self, sealed: bytes | memoryview, context: bytes) -> bytes | None:
        """Return what was sealed; None if a bit of it, or the context, is another."""
        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
        except InvalidTag:
            return None

    def open_into(self, sealed: memoryview, context: bytes, buffer: memoryview) -> bool:
        """Decrypt into a buffer of exactly its size; False if a bit of it, or the context, is another."""
        try:
            self._aead.decrypt_into(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context, buffer)
        except InvalidTag:
            return False
        return True


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key=key, person=purpose, digest_size=_KEY_BYTES).digest()


def _decoded(content: bytes) -> bytes | None:
    """The key in a file. Hex of 32 bytes is no base64 of 32 bytes, because the lengths differ."""
    if len(content) == _KEY_BYTES:
        return content
    text = content.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    try:
        key = base64.b64decode(text, altchars=b"-_" if re.search(rb"[-_]", text) else None, validate=True)
    except binascii.Error:
        return None
    return key if len(key) == _KEY_BYTES else None
