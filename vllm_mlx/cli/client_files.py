"""Writes the files that clients read, and keeps a copy of the user's own. Knows no client."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.private_file import write_private
from .terminal import CommandFailed


@dataclass(frozen=True, slots=True)
class JsonEntries:
    """Values for a JSON file of the user, whose other values stay."""

    path: Path
    values: Any  # an object or a list


@dataclass(frozen=True, slots=True)
class TextLines:
    """Lines for the end of a file of the user. A file that has a line beginning with `marker` is refused."""

    path: Path
    marker: str
    text: str


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file in the client's folder that nobody but `launch` writes."""

    path: Path
    text: str


SettingsChange = JsonEntries | TextLines | OwnFile


def text_of(path: Path, document: Any) -> str:
    """Write a document of JSON values in the format of the file's suffix."""
    match path.suffix:
        case ".toml":
            return "\n".join(_toml(document)) + "\n"
        case ".yaml" | ".yml":
            return "\n".join(_yaml(document)) + "\n"
        case _:
            return pretty(document)


def as_json(value: Any) -> str:
    """Return JSON on one line that is also TOML and YAML: these do not join two escapes to one character."""
    return json.dumps(value, ensure_ascii=False)


def pretty(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _toml(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Yield lines of TOML. JSON's texts, numbers and lists of these are TOML, too."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {as_json(value)}" for key, value in values.items() if key not in tables]
    if table and lines:
        yield from ("", f"[{table}]")
    yield from lines
    for key, value in tables.items():
        yield from _toml(value, f"{table}.{key}" if table else key)


def _yaml(values: Any) -> Iterator[str]:
    """Yield lines of YAML. JSON's texts and numbers are YAML, too."""
    if isinstance(values, list):
        for entry in values:
            first, *rest = _yaml(entry)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    elif isinstance(values, Mapping):
        for key, value in values.items():
            name = key if key.replace("-", "").replace("_", "").isalnum() else as_json(key)
            if isinstance(value, Mapping | list) and value:
                yield f"{name}:"
                yield from (f"  {line}" for line in _yaml(value))
            else:
                yield f"{name}: {as_json(value)}"
    else:
        yield as_json(values)


_BEGIN, _END = "# vllm-mlx launch: begin\n", "# vllm-mlx launch: end\n"
_OURS = "# Written by vllm-mlx launch, which replaces it.\n"


def write_own(path: Path, text: str) -> None:
    """Write a file as a whole. Only its owner may read it, because it may hold a key. Raises CommandFailed."""
    path = path.resolve()  # a link stays a link
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, text.encode())
    except OSError as error:
        raise CommandFailed(f"Cannot write {path}: {error.strerror}.") from error


def write_settings(entries: SettingsChange) -> str:
    """Write a client's settings, and keep a copy of the user's file. Returns what was done. Raises CommandFailed."""
    path = entries.path
    old = _read(path)
    text = _new(old, entries)
    if text == old:
        return f"{path} needs no change."
    backup = path.with_name(path.name + ".before-vllm-mlx")
    if old and not backup.exists() and not isinstance(entries, OwnFile):
        write_own(backup, old)
    write_own(path, text)
    return f"Wrote {path}" + (f"; the file before the first change is {backup.name}." if backup.exists() else ".")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"Cannot read {path}, so it is left alone: {type(error).__name__}.") from error


def _new(old: str, entries: SettingsChange) -> str:
    match entries:
        case JsonEntries():
            return _merged(entries.path, old, entries)
        case TextLines():
            return _with_lines(old, entries)
        case OwnFile():
            if old and not old.startswith(_OURS):
                raise CommandFailed(f"{entries.path} is not from vllm-mlx, so it is left alone: see --print.")
            return _OURS + entries.text


def _merged(path: Path, old: str, entries: JsonEntries) -> str:
    kind = type(entries.values)
    try:
        held = json.loads(old) if old.strip() else kind()
    except ValueError as error:
        raise CommandFailed(f"{path} is not plain JSON ({error}), so it is left alone: see --print.") from error
    if not isinstance(held, kind):
        name = "list" if kind is list else "object"
        raise CommandFailed(f"{path} does not hold a JSON {name}, so it is left alone: see --print.")
    return pretty(_merge(held, entries.values))


def _merge(held: Any, new: Any) -> Any:
    """Merge objects; `new` wins. Entries of a new list come first, and replace the ones of the same `id` or name."""
    if isinstance(held, dict) and isinstance(new, dict):
        return held | {key: _merge(held.get(key), value) for key, value in new.items()}
    if isinstance(held, list) and isinstance(new, list):
        return [*new, *(entry for entry in held if _identity(entry) not in [_identity(other) for other in new])]
    return new


def _identity(entry: Any) -> Any:
    return entry.get("id", entry.get("name", entry)) if isinstance(entry, dict) else entry


def _with_lines(old: str, entries: TextLines) -> str:
    """Return the file's text with the lines at its end, or in the place of the ones that `launch` wrote before."""
    before, begin, rest = old.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and not end:
        raise CommandFailed(f"{entries.path} lacks the line `{_END.strip()}`, so it is left alone: see --print.")
    if any(line.strip().startswith(entries.marker) for line in (before + after).splitlines()):
        raise CommandFailed(f"{entries.path} has a line `{entries.marker}` already, so it is left alone: see --print.")
    if not begin:
        before += "" if not old else "\n" if old.endswith("\n") else "\n\n"
    return before + _BEGIN + entries.text + _END + after
