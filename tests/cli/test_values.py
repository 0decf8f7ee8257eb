"""Sizes and files of API keys, as people write them."""

import logging
from pathlib import Path

import pytest

from vllm_mlx.cli.options import load_settings
from vllm_mlx.cli.remote import find_server
from vllm_mlx.cli.settings import flag_name
from vllm_mlx.cli.values import read_bytes, read_keys, read_memory
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.memory import physical_memory


def test_keys_of_flags_and_file_are_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the laptops\nfirst\n\n  second  \nann:sk-a:b\n")
    file.chmod(0o600)
    settings = load_settings({"api_key": ["third", "a,b", "first"], "api_key_file": str(file)})
    assert settings.api_keys == ("third", "a,b", "first", "second", "sk-a:b")
    assert [key.name for key in settings.keys] == ["key1", "key2", "key3", "key4", "ann"]
    assert not caplog.records
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert [line.secret for line in read_keys(file, "--api-key-file")] == ["first", "second", "sk-a:b"]
    assert "chmod 600" in caplog.text and "first" not in caplog.text


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("k")
    monkeypatch.setenv("VLLM_MLX_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("VLLM_MLX_API_KEY", "x, y")
    assert load_settings({}).api_keys == ("x", "y", "k")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read"), (b"\xff", "is not UTF-8 text"), (b"# none\n", "has no keys")]
)
def test_a_file_without_keys_is_no_open_door(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_keys(file, "--api-key-file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ann:s3cret\nben:s3cret", "line 2 of .*keys: it has the same key as line 1"),
        ("s3cret\n# x\ns3cret", "line 3 of .*keys: it has the same key as line 1"),
        ("ann:s3cret\nann:other", "line 2 of .*keys: line 1 also has the name ann"),
        ("ann smith:s3cret", "line 1 of .*keys: the name before the colon may have letters"),
        (":s3cret", "the name before the colon may have letters"),
        ("\nann:", "line 2 of .*keys: there is no key after the name"),
        ("ann:s3cret 3", "line 1 of .*keys: a key must not contain spaces"),
        ("ann: s3cret", "a key must not contain spaces"),
        ("s3cret # of Ann", "Write comments on lines of their own"),
    ],
)
@pytest.mark.parametrize("flag", ["api_key_file", "admin_key_file"])
def test_a_bad_line_is_named_and_never_quoted(tmp_path: Path, text: str, words: str, flag: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        _ = load_settings({flag: str(file)}).keys
    assert caught.value.message.startswith(f"{flag_name(flag)}: ") and "s3cret" not in caught.value.message


def test_admin_keys_are_no_ordinary_ones(tmp_path: Path) -> None:
    ordinary, admins = tmp_path / "keys", tmp_path / "admins"
    ordinary.write_text("ann:a\nkey1:b")
    admins.write_text("root:r\nplain")
    settings = load_settings({"api_key": ["f"], "api_key_file": str(ordinary), "admin_key_file": str(admins)})
    told = [(key.name, key.secret, key.is_admin) for key in settings.keys]
    assert told == [
        ("key2", "f", False),
        ("ann", "a", False),
        ("key1", "b", False),
        ("root", "r", True),
        ("key3", "plain", True),
    ]
    assert settings.api_keys == ("f", "a", "b")


@pytest.mark.parametrize(("line", "words"), [("root:a", "is also given with --api-key"), ("ann:r", "the name ann")])
def test_a_key_or_name_stands_in_one_file_only(tmp_path: Path, line: str, words: str) -> None:
    ordinary, admins = tmp_path / "keys", tmp_path / "admins"
    ordinary.write_text("ann:a")
    admins.write_text(line)
    with pytest.raises(ConfigError, match=words):
        _ = load_settings({"api_key_file": str(ordinary), "admin_key_file": str(admins)}).keys


@pytest.mark.parametrize(("as_admin", "expected"), [(False, "a"), (True, "r")])
def test_commands_that_manage_send_an_admin_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_admin: bool, expected: str
) -> None:
    for name, text in (("API", "ann:a"), ("ADMIN", "root:r")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"VLLM_MLX_{name}_KEY_FILE", str(tmp_path / name))
    assert find_server(None, None, as_admin=as_admin).api_key == expected
    assert find_server("http://elsewhere", None, as_admin=as_admin).api_key is None
    monkeypatch.delenv("VLLM_MLX_API_KEY_FILE")
    assert find_server(None, None, as_admin=as_admin).api_key == ("r" if as_admin else None)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("17179869184", 2**34),
        (17179869184, 2**34),
        (None, None),
    ],
)
def test_bytes(text: object, num_bytes: int | None) -> None:
    assert read_memory(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.7", 0.7), (0.7, 0.7), (".5", 0.5), ("1", 1.0), (1, 1.0), ("70%", 0.7), ("100 %", 1.0), ("0.5%", 0.005)],
)
def test_a_share_is_of_the_machines_memory(text: object, share: float) -> None:
    assert read_memory(text) == int(share * physical_memory())


@pytest.mark.parametrize(
    "text", ["", "lots", "-4GB", "0", "0GB", "24XB", "24GB more", "120%", "24", "1.5", "nan", "inf", "1e9", True]
)
def test_anything_else_is_refused_with_the_accepted_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"such as 24GB|at most 100%"):
        read_memory(text)


@pytest.mark.parametrize("text", ["", "20XB", "50%", "-1", "1e9", "20MB 5"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20MB"):
        read_bytes(text)
