"""Values as people write them, if their type has no form: sizes, lists, templates, files of API keys."""

import json
import logging
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from ..core.config import MediaConfig, ReasoningStrings, read_draft_tokens
from ..core.errors import ConfigError
from ..core.memory import physical_memory
from ..util.tenants import APIKey, unnamed_keys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which people write a setting's value. `read` raises ValueError, which names the right form."""

    metavar: str
    note: str = ""  # the end of the help text
    read: Callable[[object], object] = lambda value: value


def read_list(value: object) -> object:
    """Split several values that are written as `a,b`, as environment variables write them."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


_SIZE = re.compile(r"[0-9]*\.?[0-9]+\s*[a-z]*", re.IGNORECASE)  # `ByteSize` alone ignores text after a unit
_SHARE = re.compile(r"([0-9]*\.?[0-9]+)\s*(%?)")
_BYTE_SIZE = TypeAdapter(ByteSize)
_LEAST_MEMORY = 10**6  # bytes; a smaller number lacks its unit
_DISK_HINT = "give bytes, such as 100GB, or 0"
_MEMORY_HINT = "give bytes, such as 24GB or 800MiB, or a share of the machine's memory, such as 0.7"


def read_bytes(value: object, hint: str = "give bytes, such as 20MB") -> int:
    """Read a number of bytes, such as the size of a file."""
    text = str(value).strip()
    try:
        return int(_BYTE_SIZE.validate_python(text if _SIZE.fullmatch(text) else ""))
    except ValidationError as error:
        raise ValueError(hint) from error


def read_memory(value: object) -> int | None:
    """Read bytes, or a share of the machine's memory: percents and numbers up to 1."""
    if value is None:
        return None
    share = _SHARE.fullmatch(str(value).strip())
    if share and (share[2] or float(share[1]) <= 1):
        part = float(share[1]) / (100 if share[2] else 1)
        if part > 1:
            raise ValueError("a share is at most 100%")
        num_bytes = int(part * physical_memory())
    else:
        num_bytes = read_bytes(value, _MEMORY_HINT)
    if num_bytes < _LEAST_MEMORY:
        raise ValueError(_MEMORY_HINT)
    return num_bytes


def read_disk(value: object) -> int:
    """Read bytes, or 0. Other small numbers lack their unit and are refused."""
    num_bytes = read_bytes(value, _DISK_HINT)
    if 0 < num_bytes < _LEAST_MEMORY:
        raise ValueError(_DISK_HINT)
    return num_bytes


def read_template(value: object) -> object:
    """Return a template. A text without a brace cannot be one, so it names the file of the template."""
    if not isinstance(value, str) or "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the template file {value}: {reason(error)}") from error


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a file could not be read as text."""
    return (error.strerror or "it cannot be opened") if isinstance(error, OSError) else "it is not UTF-8 text"


def read_reasoning_strings(value: object) -> object:
    """Read a JSON object with two texts, under vLLM's present or older names."""
    if not isinstance(value, str):
        return value
    try:
        given = json.loads(value)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    known = {"reasoning_start_str", "reasoning_end_str", "think_start_str", "think_end_str"}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError("it must be an object with `reasoning_start_str` and `reasoning_end_str`")
    start, end = (given.get(f"reasoning_{part}_str") or given.get(f"think_{part}_str") for part in ("start", "end"))
    if not (isinstance(start, str) and start.strip() and isinstance(end, str) and end.strip()):
        raise ValueError("`reasoning_start_str` and `reasoning_end_str` must both be texts")
    return ReasoningStrings(start, end)


def read_prompts(value: object) -> object:
    """Read a JSON object of texts by name."""
    return json.loads(value) if isinstance(value, str) else value


_SOURCES = (
    "this server drafts from the prompt, the reply, a `prediction`, grammars, and with the method mtp by the model's "
    "MTP head"
)
LOOKUPS = ("prompt_lookup_max", "prompt_lookup_min")  # lengths of n-grams, which are fixed here
_METHODS = ("ngram", "[ngram]", "mtp", "qwen3_5_mtp")


def read_speculative_config(value: object) -> str:
    """Return vLLM's JSON as a text, if this server supports its values."""
    try:
        given = value if isinstance(value, dict) else json.loads(str(value))
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("it must be an object")
    given = {name: part for name, part in given.items() if part is not None}
    if (method := given.get("method", "ngram")) not in _METHODS:
        raise ValueError(f"the method {method} is not supported: {_SOURCES}")
    if not method.endswith("mtp") and (model := given.pop("model", "ngram")) not in _METHODS:
        raise ValueError(f"the model {model} is not supported: {_SOURCES}")
    if not isinstance(given.get("model", ""), str):
        raise ValueError("`model` must be a text")
    if unknown := given.keys() - {"method", "model", "num_speculative_tokens", *LOOKUPS}:
        raise ValueError(f"`{min(unknown)}` is not supported")
    if "num_speculative_tokens" in given:
        try:
            given["num_speculative_tokens"] = read_draft_tokens(given["num_speculative_tokens"])
        except ValueError as error:
            raise ValueError(f"`num_speculative_tokens`: {error}") from error
    return json.dumps(given)


_MEDIA_HINT = 'write image=4,video=1, or {"image": 4, "video": 1}'
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(\d{1,9})\s*")
_MEDIA = MediaConfig()
DEFAULT_MEDIA_LIMITS = f"image={_MEDIA.max_images},video={_MEDIA.max_videos},document={_MEDIA.max_documents}"


def read_media_limits(value: object) -> str:
    """Return the limits as `image=4,video=1`, with defaults for kinds that are left out. vLLM takes the same forms."""
    given = value if isinstance(value, dict) else _media_limits(str(value))
    if not given or any(type(number) is not int or number < 0 for number in given.values()):
        raise ValueError(_MEDIA_HINT)
    limits = media_limits(DEFAULT_MEDIA_LIMITS)
    for kind in given.keys() - limits.keys():
        if given[kind] != 0:
            raise ValueError(f"this server does not take {kind}; {_MEDIA_HINT}")
    return ",".join(f"{kind}={given.get(kind, number)}" for kind, number in limits.items())


def media_limits(text: str) -> dict[str, int]:
    """Return the limits by kind, from the text that `read_media_limits` returned."""
    return {kind: int(number) for kind, number in _PAIR.findall(text)}


def _media_limits(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ValueError(_MEDIA_HINT) from error
    pairs = [_PAIR.fullmatch(part) for part in text.split(",")]
    return {pair[1]: int(pair[2]) for pair in pairs if pair} if all(pairs) else {}


_KEY_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A line of a key file: `NAME:KEY`, or `KEY` alone, which gets a name later."""

    place: str  # flag, number and file, for messages
    number: int
    name: str | None
    secret: str


def all_keys(given: Iterable[str], key_file: Path | None, admin_file: Path | None) -> tuple[APIKey, ...]:
    """Collect the keys of the flags, then of --api-key-file, then of --admin-key-file. Raises ConfigError."""
    lines = [] if key_file is None else read_keys(key_file, "--api-key-file")
    admins = [] if admin_file is None else read_keys(admin_file, "--admin-key-file")
    flagged = [secret for secret in dict.fromkeys(given) if secret not in {line.secret for line in lines}]
    if any(secret != secret.strip() or not secret.isprintable() for secret in flagged):
        raise ConfigError("--api-key: a key must not contain line breaks, or begin or end with a space.")
    ordinary = {*flagged, *(line.secret for line in lines)}
    names = {line.name for line in lines if line.name is not None}
    for line in admins:
        if line.secret in ordinary:
            advice = "this key is also given with --api-key or --api-key-file. Choose another one."
            raise ConfigError(f"{line.place}: {advice}")
        if line.name in names:
            raise ConfigError(f"{line.place}: --api-key-file also has the name {line.name}.")
    every = [*(KeyLine("", 0, None, secret) for secret in flagged), *lines, *admins]
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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: cannot read {path}: {reason(error)}.") from error
    keys: list[KeyLine] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            name, colon, secret = line.partition(":") if ":" in line else ("", "", line)
            key = KeyLine(f"{flag}: line {number} of {path}", number, name if colon else None, secret)
            if (fault := _fault(key, keys)) is not None:
                raise ConfigError(f"{key.place}: {fault}")
            keys.append(key)
    if not keys:
        raise ConfigError(f"{flag}: {path} has no keys. Write one on each line, as NAME:KEY.")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("Others on this machine may read the API keys: chmod 600 %s", path)
    return keys


def _fault(key: KeyLine, before: list[KeyLine]) -> str | None:
    """Say what is wrong with a line, never quoting the line, because it may hold a key. Returns None for a good one."""
    if key.name is not None and not _KEY_NAME.fullmatch(key.name):
        return "the name before the colon may have letters, digits, dots, `-` and `_` only."
    if not key.secret:
        return "there is no key after the name. Write NAME:KEY."
    if " " in key.secret or not key.secret.isprintable():
        return "a key must not contain spaces. Write comments on lines of their own."
    for other in before:
        if other.secret == key.secret:
            return f"it has the same key as line {other.number}. Remove one of them."
        if key.name is not None and other.name == key.name:
            return f"line {other.number} also has the name {key.name}. Choose another."
    return None
