"""Records of requests for reports of faults: a file each, with the shape of the request and without its texts."""

import json
import logging
import os
import queue
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.errors import ConfigError, RequestError, setting
from ..core.private_file import write_private
from .config import ServerConfig
from .json_bytes import read_json
from .shapes import Shaper, without_quotes

logger = logging.getLogger(__name__)

MAX_FILES = 1000
MAX_BYTES = 64 * 1024 * 1024
MAX_RECORD_BYTES = 4 * 1024 * 1024
MAX_READ_BYTES = 32 * 1024 * 1024  # a longer body is recorded by its length
CLOSE_S = 5.0
MAX_WAITING = 64  # records that wait for the thread; further ones are left out
_HEADERS = ("user-agent", "content-type", "content-length", "anthropic-version", "anthropic-beta")
_PREFIX = "request-"


def open_recorder(config: ServerConfig) -> "RequestRecorder | None":
    """The recorder that the settings ask for. Raises ConfigError for a folder that cannot be written."""
    return None if config.record_requests is None else RequestRecorder(Path(config.record_requests))


class RequestRecorder:
    """Writes records on a thread of its own. The oldest files make room for new ones."""

    def __init__(
        self, folder: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES, max_waiting: int = MAX_WAITING
    ) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        self._folder = folder.expanduser()
        self._max_files, self._max_bytes = max_files, max_bytes
        self._salt = secrets.token_bytes(16)
        self._started_s = time.monotonic()
        self._num_written = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
            self._files = deque((path, path.stat().st_size) for path in sorted(self._folder.glob(f"{_PREFIX}*.json")))
        except OSError as error:
            raise ConfigError(
                f"{setting('record_requests')} {folder} cannot be written: {error.strerror}. Name another folder."
            ) from error
        self._waiting: queue.Queue[tuple[dict[str, Any], bytes] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def offer(self, facts: Mapping[str, Any], headers: Mapping[str, str], body: bytes) -> None:
        """Record a request that has ended. `facts`: its method, endpoint and response. Never waits."""
        record = {
            "session": "recorded",
            "t": round(time.monotonic() - self._started_s, 3),
            **facts,
            "headers": {name: headers[name][:200] for name in _HEADERS if name in headers},
            "server": __version__,
        }
        try:
            self._waiting.put_nowait((record, body))
        except queue.Full:
            logger.warning("A request was not recorded, because %d others wait to be written.", self._waiting.maxsize)

    def close(self) -> None:
        """Write what waits, and end the thread; after `CLOSE_S` seconds what still waits is lost."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            self._write(*waiting)

    def _write(self, record: dict[str, Any], body: bytes) -> None:
        message = record["response"].get("message")
        if message is not None:
            record["response"]["message"] = without_quotes(message)
        line = json.dumps({**record, "shape": self._shape(body)}, ensure_ascii=False)
        if len(line) > MAX_RECORD_BYTES:
            line = json.dumps({**record, "shape": {"~long": len(body)}})
        self._num_written += 1
        name = f"{_PREFIX}{time.time_ns() // 1_000_000}-{os.getpid()}-{self._num_written:06}.json"
        try:
            content = f"{line}\n".encode()
            write_private(self._folder / name, content)
            self._files.append((self._folder / name, len(content)))
            self._make_room()
        except OSError as error:
            logger.warning("A request was not recorded in %s: %s", self._folder, error.strerror)

    def _shape(self, body: bytes) -> Any:
        if len(body) > MAX_READ_BYTES:
            return {"~long": len(body)}
        try:
            return Shaper(self._salt).shape(read_json(body))
        except (ValueError, RequestError):
            return {"~invalid": len(body)}

    def _make_room(self) -> None:
        total = sum(num_bytes for _, num_bytes in self._files)
        while len(self._files) > self._max_files or total > self._max_bytes:
            path, num_bytes = self._files.popleft()
            total -= num_bytes
            path.unlink(missing_ok=True)
