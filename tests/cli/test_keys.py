"""Keys from a file, and a door that is not left open."""

import logging
from pathlib import Path

import pytest

from vllm_mlx.cli.keys import read_keys, refuse_open_door
from vllm_mlx.cli.sources import load_settings
from vllm_mlx.core.errors import ConfigError


def test_keys_of_flags_and_file_are_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the laptops\nfirst\n\n  second  \nfirst\n")
    file.chmod(0o600)
    settings = load_settings({"api_key": ["third", "a,b"], "api_key_file": str(file)})
    assert settings.api_keys == ("third", "a,b", "first", "second")
    assert not caplog.records
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert read_keys(file) == ("first", "second", "first")
    assert "chmod 600" in caplog.text and "first" not in caplog.text


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("k")
    monkeypatch.setenv("VLLM_MLX_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("VLLM_MLX_API_KEY", "x, y")
    assert load_settings({}).api_keys == ("x", "y", "k")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read"), (b"\xff", "is not UTF-8 text"), (b"# none\n", "holds no key")]
)
def test_a_file_without_keys_is_no_open_door(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_keys(file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "mymac.local"])
def test_beyond_this_machine_a_key_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key or --api-key-file, or say --insecure") as caught:
        refuse_open_door(host, has_keys=False, insecure=False)
    assert "\n" not in caught.value.message
    refuse_open_door(host, has_keys=True, insecure=False)
    refuse_open_door(host, has_keys=False, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_alone_needs_none(host: str) -> None:
    refuse_open_door(host, has_keys=False, insecure=False)
