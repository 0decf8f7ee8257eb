"""Writes settings as TOML, as they were given."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from ..core.config import ReasoningStrings
from .settings import OF_A_MODEL, Settings


def texts(settings: Settings) -> tuple[str, str]:
    """Return the settings file and the key file as TOML, with absolute paths: a service has its own folder."""
    names = settings.model_fields_set - (OF_A_MODEL if settings.models else set()) - {"models", "api_key"}
    tables = [f"\n[[models]]\n{_lines(listed, listed.model_fields_set)}" for listed in settings.models]
    return _lines(settings, names) + "".join(tables), _lines(settings, settings.model_fields_set & {"api_key"})


def _lines(values: BaseModel, names: Iterable[str]) -> str:
    lines = []
    for name in sorted(names):
        value = _plain(getattr(values, name))
        if name == "model" and Path(value).expanduser().is_dir():
            value = str(Path(value).expanduser().resolve())
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)


def _plain(value: Any) -> Any:
    """Return a setting's value in the types of TOML."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case ReasoningStrings(start=start, end=end):
            return json.dumps({"reasoning_start_str": start, "reasoning_end_str": end})
        case Path():
            return str(value.expanduser().absolute())
        case tuple() | list():
            return [_plain(part) for part in value]
        case _:
            return value
