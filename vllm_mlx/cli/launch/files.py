"""Writes what a client reads: files of our own, and on `--write` entries in its user's. Nothing is lost there."""

import json
import tempfile
from pathlib import Path
from typing import Any

from ..failures import CommandFailed
from .plan import JsonEntries, Lasting, OwnFile, TextLines, pretty

_BEGIN, _END = "# vllm-mlx launch: begin\n", "# vllm-mlx launch: end\n"
_OURS = "# Written by vllm-mlx launch, which replaces it.\n"


def write_own(path: Path, text: str) -> None:
    """For its owner's eyes: it may hold a key. The whole file or nothing. Raises CommandFailed."""
    path = path.resolve()  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:  # mode 600
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise CommandFailed(f"Cannot write {path}: {error.strerror}.") from error


def write_lasting(entries: Lasting) -> str:
    """The file as it was before the first time is left beside it. Says what was done. Raises CommandFailed."""
    path = entries.path
    old = _read(path)
    text = _new(old, entries)
    if text == old:
        return f"{path} says so already."
    backup = path.with_name(path.name + ".before-vllm-mlx")
    if old and not backup.exists() and not isinstance(entries, OwnFile):
        write_own(backup, old)
    write_own(path, text)
    return f"Wrote {path}" + (f"; as it was before, it is {backup.name}." if backup.exists() else ".")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"Cannot read {path}, so it is left alone: {type(error).__name__}.") from error


def _new(old: str, entries: Lasting) -> str:
    match entries:
        case JsonEntries():
            return _merged(entries.path, old, entries)
        case TextLines():
            return _with_lines(old, entries)
        case OwnFile():
            if old and not old.startswith(_OURS):
                raise CommandFailed(f"{entries.path} was written by somebody else, so it is left alone: see --print.")
            return _OURS + entries.text


def _merged(path: Path, old: str, entries: JsonEntries) -> str:
    try:
        held = json.loads(old) if old.strip() else {}
    except ValueError as error:
        raise CommandFailed(f"{path} is no plain JSON ({error}), so it is left alone: see --print.") from error
    if not isinstance(held, dict):
        raise CommandFailed(f"{path} holds no JSON object, so it is left alone: see --print.")
    return pretty(_merge(held, dict(entries.values)))


def _merge(held: Any, new: Any) -> Any:
    """`new` wins, object by object; it stands first in a list, in place of what has its `id`."""
    if isinstance(held, dict) and isinstance(new, dict):
        return held | {key: _merge(held.get(key), value) for key, value in new.items()}
    if isinstance(held, list) and isinstance(new, list):
        return [*new, *(each for each in held if _identity(each) not in [_identity(other) for other in new])]
    return new


def _identity(entry: Any) -> Any:
    return entry.get("id", entry) if isinstance(entry, dict) else entry


def _with_lines(old: str, entries: TextLines) -> str:
    """At the end, or in the place of those of the last time."""
    before, begin, rest = old.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and not end:
        raise CommandFailed(f"{entries.path} lacks the line `{_END.strip()}`, so it is left alone: see --print.")
    if any(line.strip().startswith(entries.marker) for line in (before + after).splitlines()):
        raise CommandFailed(f"{entries.path} has a line `{entries.marker}` already, so it is left alone: see --print.")
    if not begin:
        before += "" if not old else "\n" if old.endswith("\n") else "\n\n"
    return before + _BEGIN + entries.text + _END + after
