"""API keys from a file, and the rule that an open door needs one. Knows no route."""

import logging
import stat
from pathlib import Path

from ..core.errors import ConfigError
from .banner import is_local

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> tuple[str, ...]:
    """One key a line; blank lines and those that begin with `#` are none. Raises ConfigError."""
    path = path.expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file: {path} is not UTF-8 text.") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key. Write one on each line.")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("Others on this machine may read the API keys: chmod 600 %s", path)
    return keys


def refuse_open_door(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Raises ConfigError where the network could use the server and nothing is asked of it."""
    if not (is_local(host) or has_keys or insecure):
        raise ConfigError(
            f"--host {host} opens the server beyond this machine: ask for a key with --api-key or --api-key-file, "
            "or say --insecure to let anybody in."
        )
