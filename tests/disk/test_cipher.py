"""Keys come from files that nobody else reads, and what is sealed opens only where it belongs."""

import base64
from pathlib import Path

import pytest

from vllm_mlx.core.errors import ConfigError
from vllm_mlx.disk.cipher import Cipher

KEY = bytes(range(200, 232))


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY) + b"\n",
     base64.urlsafe_b64encode(KEY)],
    ids=["bytes", "hex", "HEX", "base64", "url"],
)  # fmt: skip
def test_every_form_of_a_key_is_the_same_key(tmp_path, content):
    cipher = Cipher.from_file(key_file(tmp_path, content))
    assert (cipher.key_id, cipher.name_key) == (Cipher(KEY).key_id, Cipher(KEY).name_key)
    assert cipher.open(Cipher(KEY).seal(b"data", b"here"), b"here") == b"data"


@pytest.mark.parametrize("content", [b"", KEY[:-1], KEY + b"1", KEY.hex().encode()[:-1], b"secret\n", b"=" * 44])
def test_other_contents_are_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"--cache-disk-key-file: .* holds no key of 32 bytes"):
        Cipher.from_file(key_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o622])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match="Run `chmod 600 "):
        Cipher.from_file(key_file(tmp_path, KEY, mode))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Cipher.from_file(tmp_path / "key")
    with pytest.raises(ConfigError, match="cannot be read"):
        Cipher.from_file(tmp_path)


def test_what_is_sealed_opens_only_unchanged_in_its_place_with_its_key():
    cipher, sealed = Cipher(KEY), Cipher(KEY).seal(b"some data", b"here")
    assert len(sealed) == len(b"some data") + Cipher.OVERHEAD and b"data" not in sealed
    assert cipher.open(sealed, b"here") == b"some data"
    buffer = bytearray(9)
    assert cipher.open_into(memoryview(sealed), b"here", memoryview(buffer)) and bytes(buffer) == b"some data"
    assert cipher.open(sealed, b"there") is None and Cipher(bytes(32)).open(sealed, b"here") is None
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        assert cipher.open(changed, b"here") is None
        assert not cipher.open_into(memoryview(changed), b"here", memoryview(bytearray(9)))


def test_no_two_seals_are_equal():
    assert Cipher(KEY).seal(b"data", b"here") != Cipher(KEY).seal(b"data", b"here")


def test_what_is_derived_from_a_key_does_not_show_it():
    cipher = Cipher(KEY)
    assert KEY.hex() not in cipher.key_id + cipher.name_key.hex() and cipher.key_id not in cipher.name_key.hex()
