"""Files of API keys.

A line is `NAME:KEY`, or `KEY` alone, which gets a name.
"""

import logging
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import ConfigError
from ..core.tenants import APIKey, unnamed_keys

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class KeyLine:
    number: int
    name: str | None
    secret: str


def all_keys(given: Iterable[str], key_file: Path | None, admin_file: Path | None) -> tuple[APIKey, ...]:
    """Collect the keys of the flags, then of --api-key-file, then of --admin-key-file. Raises ConfigError."""
    lines = [] if key_file is None else read_keys(key_file, "--api-key-file")
    admins = [] if admin_file is None else read_keys(admin_file, "--admin-key-file")
    flagged = [secret for secret in dict.fromkeys(given) if secret not in {line.secret for line in lines}]
    if any(secret != secret.strip() or not secret.isprintable() for secret in flagged):
        raise ConfigError("--api-key: a key has no line breaks, and no spaces around it.")
    ordinary = {*flagged, *(line.secret for line in lines)}
    names = {line.name for line in lines if line.name is not None}
    for line in admins:
        if line.secret in ordinary:
            raise _bad("--admin-key-file", admin_file, line.number, "the key is an ordinary one too. Choose another.")
        if line.name in names:
            raise _bad("--admin-key-file", admin_file, line.number, f"--api-key-file has the name {line.name} too.")
    every = [*(KeyLine(0, None, secret) for secret in flagged), *lines, *admins]
    taken = {line.name for line in every if line.name is not None}
    unnamed = iter(unnamed_keys([line.secret for line in every if line.name is None], taken=taken))
    keys = [next(unnamed) if line.name is None else APIKey(line.name, line.secret) for line in every]
    num_ordinary = len(every) - len(admins)
    return (*keys[:num_ordinary], *(replace(key, is_admin=True) for key in keys[num_ordinary:]))


def read_keys(path: Path, flag: str) -> list[KeyLine]:
    """Read a key file. Blank lines and lines that begin with `#` are left out. Raises ConfigError."""
    path = path.expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {path} is not UTF-8 text.") from error
    keys: list[KeyLine] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            keys.append(_key(line, number, keys, path, flag))
    if not keys:
        raise ConfigError(f"{flag}: {path} holds no key. Write one on each line, as NAME:KEY.")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("Others on this machine may read the API keys: chmod 600 %s", path)
    return keys


def _key(line: str, number: int, before: list[KeyLine], path: Path, flag: str) -> KeyLine:
    """Messages name the line and never quote it: it may hold a key."""
    name, colon, secret = line.partition(":") if ":" in line else ("", "", line)
    if colon and not _NAME.fullmatch(name):
        raise _bad(flag, path, number, "before the colon comes a name of letters, digits, dots, `-` and `_`.")
    if not secret:
        raise _bad(flag, path, number, "the name has no key. Write NAME:KEY.")
    if " " in secret or not secret.isprintable():
        raise _bad(flag, path, number, "a key has no spaces. Begin comments on their own line.")
    for other in before:
        if other.secret == secret:
            raise _bad(flag, path, number, f"the key of line {other.number} comes again. Remove one of them.")
        if colon and other.name == name:
            raise _bad(flag, path, number, f"the name {name} is that of line {other.number}. Choose another.")
    return KeyLine(number, name if colon else None, secret)


def _bad(flag: str, path: Path | None, number: int, why: str) -> ConfigError:
    return ConfigError(f"{flag}: line {number} of {path}: {why}")
