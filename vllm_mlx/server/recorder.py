"""Records requests for reports of faults: one JSON object a line, in which made-up letters replace texts.

`scripts/replay` can send most records again: bodies keep their structure, and their texts keep their lengths.
"""

import hashlib
import json
import logging
import os
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

MAX_BYTES = 32 * 1024 * 1024  # a longer file becomes FILE.1, which replaces an earlier one
MAX_BODY_BYTES = 4 * 1024 * 1024  # a longer body is recorded by its length
MAX_WAITING = 16  # records that wait for the thread; further ones are left out
_HEADERS = ("user-agent", "content-type", "content-length", "anthropic-version", "anthropic-beta")
_WORD_FIELDS = frozenset({  # their values may be words of the protocols
    "type", "role", "media_type", "tool_choice", "effort", "reasoning_effort", "detail", "display", "include", "status",
    "summary", "syntax", "ttl", "verbosity", "truncation", "service_tier", "format",
})  # fmt: skip
_PROTOCOL_WORDS = """
1h 5m adaptive all allowed_tools any application/pdf approximate array assistant audio auto base64 boolean
clear_thinking_20251015 clear_tool_uses_20250919 completed concise content custom custom_tool_call
custom_tool_call_output date date-time default detailed developer disabled document email enabled ephemeral failed
file flex function function_call function_call_output grammar high image image/gif image/jpeg image/png image/webp
image_url in_progress incomplete input_audio input_file input_image input_text integer ipv4 ipv6 item_reference
json_object json_schema lark local_shell low max medium message minimal namespace none null number object omitted
original output_text priority reasoning reasoning.encrypted_content reasoning_text redacted_thinking refusal regex
required search_result server_tool_use string structural_tag summarized summary_text system text thinking time tool
tool_reference tool_result tool_use updates uri url user uuid video video_url web_search web_search_20250305
web_search_call web_search_result web_search_tool_result web_search_tool_result_error xhigh
"""
_WORDS = frozenset(_PROTOCOL_WORDS.split())  # of the protocols and of JSON Schema; any other word is a text
_NAME_FIELDS = frozenset({  # objects whose keys are names
    "properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentRequired", "dependentSchemas",
})  # fmt: skip
_FREE_FIELDS = frozenset({  # they hold any data of the client
    "arguments", "chat_template_kwargs", "client_metadata", "const", "default", "documents", "enum", "env", "example",
    "examples", "extra_body", "headers", "input", "logit_bias", "media_io_kwargs", "metadata", "mm_processor_kwargs",
    "variables", "vllm_xargs",
})  # fmt: skip
_LETTERS = " etaoin shrdlu"


def open_recorder(config: ServerConfig) -> "RequestRecorder | None":
    """Return the recorder that the settings ask for. Raises ConfigError for a file that cannot be written."""
    return None if config.record_requests is None else RequestRecorder(Path(config.record_requests))


class RequestRecorder:
    """Appends records to a file that only its owner may read, on a separate thread."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ConfigError for a file that cannot be written."""
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
        """Write waiting records, and end the thread."""
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
        case int() | float() if field in _FREE_FIELDS:
            return 0
        case dict() if field in _NAME_FIELDS:
            return {_letters(name, salt): redacted(at, salt) for name, at in value.items()}
        case {"input": list(items)} if not field:  # a conversation of Responses
            return {**redacted({**value, "input": None}, salt), "input": redacted(items, salt, "messages")}
        case dict():
            return {name: redacted(at, salt, name) for name, at in value.items()}
        case list():  # token ids are texts
            return [0 if isinstance(item, int | float) else redacted(item, salt, field) for item in value]
        case str() if field not in _WORD_FIELDS or value not in _WORDS:
            return _letters(value, salt)
        case _:
            return value


def _letters(text: str, salt: bytes) -> str:
    """Return letters that replace a text: as many, and the same ones for the same text."""
    digest = hashlib.blake2b(text.encode(errors="replace"), key=salt, digest_size=32).hexdigest()
    return (digest + _LETTERS * (len(text) // len(_LETTERS) + 1))[: len(text)]
