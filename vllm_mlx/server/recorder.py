"""Records requests for reports of faults: one JSON object a line, in which made-up letters stand for texts.

`scripts/replay` can send most records again: bodies keep their structure, and their texts keep their lengths.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.errors import ConfigError, RequestError, setting
from .config import ServerConfig
from .json_bytes import read_json

logger = logging.getLogger(__name__)

MAX_BYTES = 32 * 1024 * 1024  # a longer file becomes FILE.1, in place of an earlier one
MAX_BODY_BYTES = 4 * 1024 * 1024  # a longer body is recorded by its length
MAX_WAITING = 16  # records that wait for the thread; further ones are left out
_HEADERS = ("user-agent", "content-type", "content-length", "anthropic-version", "anthropic-beta")
_WORD = re.compile(r"[a-z0-9_./+-]{1,40}")
_WORD_FIELDS = frozenset({  # their values are words of the protocols
    "type", "role", "media_type", "tool_choice", "effort", "reasoning_effort", "detail", "display", "include", "status",
    "summary", "syntax", "ttl", "verbosity", "truncation", "service_tier", "format",
})  # fmt: skip
_NAME_FIELDS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # objects whose keys are names
_FREE_FIELDS = frozenset({"input", "metadata", "logit_bias"})  # objects that hold what the client likes
_LETTERS = " etaoin shrdlu"


def open_recorder(config: ServerConfig) -> "RequestRecorder | None":
    """Return the recorder that the settings ask for. Raises ConfigError for a file that cannot be written."""
    return None if config.record_requests is None else RequestRecorder(Path(config.record_requests))


class RequestRecorder:
    """Appends records to a file that only its owner may read, on a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be written."""
        self._path = path.expanduser()
        self._salt = secrets.token_bytes(16)
        self._started_s = time.monotonic()
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, "recorder")
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(
                f"{setting('record_requests')} {path} cannot be written: {error.strerror}. Name another file."
            ) from error

    def offer(self, facts: Mapping[str, Any], headers: Mapping[str, str], body: bytes) -> None:
        """Record a request that has ended. `facts`: its method, endpoint and result. Never waits."""
        if not self._places.acquire(blocking=False):
            logger.warning("A request was not recorded, because %d others wait to be written.", MAX_WAITING)
            return
        kept = {name: headers[name][:200] for name in _HEADERS if name in headers}
        now = round(time.monotonic() - self._started_s, 3)
        record = {"session": "recorded", "t": now, **facts, "headers": kept, "server": __version__}
        self._thread.submit(self._write, record, body)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._thread.shutdown()

    def _write(self, record: dict[str, Any], body: bytes) -> None:
        try:
            value = redacted(read_json(body), self._salt) if len(body) <= MAX_BODY_BYTES else None
        except (ValueError, RequestError):
            value = None
        try:
            line = json.dumps({**record, "num_bytes": len(body), "body": value}, ensure_ascii=False)
            self._append(f"{line}\n".encode())
        except OSError as error:
            logger.warning("A request was not recorded in %s: %s", self._path, error.strerror)
        finally:
            self._places.release()

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(self._path, flags, 0o600), "ab") as stream:
            stream.write(line)
            if stream.tell() > MAX_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))


def redacted(value: Any, salt: bytes, field: str = "") -> Any:
    """Return the JSON value without its texts. Equal texts have equal letters, which depend on `salt`.

    `field`: the name of the value's field.
    """
    match value:
        case dict() if field in _FREE_FIELDS:
            return {}
        case dict():
            hides = field in _NAME_FIELDS
            return {_letters(name, salt) if hides else name: redacted(at, salt, name) for name, at in value.items()}
        case [int() | float(), *_]:
            return [0] * len(value)  # token ids are texts
        case list():
            return [redacted(item, salt, field) for item in value]
        case str() if field not in _WORD_FIELDS or not _WORD.fullmatch(value):
            return _letters(value, salt)
        case _:
            return value


def _letters(text: str, salt: bytes) -> str:
    """Return letters that stand for a text: as many, and the same ones for the same text."""
    digest = hashlib.blake2b(text.encode(errors="replace"), key=salt, digest_size=32).hexdigest()
    return (digest + _LETTERS * (len(text) // len(_LETTERS) + 1))[: len(text)]
