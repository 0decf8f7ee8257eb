"""Journals that a cipher seals."""

import hashlib
import hmac
import os
from pathlib import Path

from .test_journal import file_of, journals, kept, put, restored


class Keyed:
    """A cipher for tests, from the standard library."""

    def __init__(self, key: bytes):
        self.key = key

    def seal(self, data: bytes, context: bytes) -> bytes:
        nonce = os.urandom(16)
        hidden = bytes(a ^ b for a, b in zip(data, self._stream(nonce, len(data)), strict=True))
        return nonce + hmac.digest(self.key, context + nonce + hidden, "sha256") + hidden

    def open(self, sealed: bytes, context: bytes) -> bytes | None:
        nonce, check, hidden = sealed[:16], sealed[16:48], sealed[48:]
        if not hmac.compare_digest(check, hmac.digest(self.key, context + nonce + hidden, "sha256")):
            return None
        return bytes(a ^ b for a, b in zip(hidden, self._stream(nonce, len(hidden)), strict=True))

    def _stream(self, nonce: bytes, length: int) -> bytes:
        return hashlib.shake_256(self.key + nonce).digest(length)


def test_sealed_journals(tmp_path: Path) -> None:
    """Only the holder of the key reads them, and a start with another key does not cost what they hold."""
    with journals(tmp_path, cipher=Keyed(b"one")) as opened:
        put(opened.open("notes"), "a", "secret")
    assert b"secret" not in file_of(tmp_path).read_bytes() and b'"put"' not in file_of(tmp_path).read_bytes()
    for cipher in (None, Keyed(b"two")):
        assert kept(tmp_path, cipher=cipher) == {}
        with journals(tmp_path, cipher=cipher) as opened:
            journal = opened.open("notes")
            assert restored(journal).values == []
            put(journal, f"by {cipher}", 1, "other")
            assert opened.flush()
            journal.clear("other")  # which compacts
    assert kept(tmp_path, cipher=Keyed(b"one")) == {"a": "secret"}


def test_with_a_key_nothing_is_believed_that_was_not_sealed(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", "open")
    assert kept(tmp_path, cipher=Keyed(b"one")) == {}
    assert kept(tmp_path) == {"a": "open"}, "it stays for a server without the key"


def test_clearing_everything_clears_what_cannot_be_read(tmp_path: Path) -> None:
    with journals(tmp_path) as opened:
        put(opened.open("notes"), "a", "open")
    with journals(tmp_path, cipher=Keyed(b"one")) as opened:
        opened.open("notes").clear("")
        assert opened.flush()
    assert file_of(tmp_path).read_bytes() == b""
