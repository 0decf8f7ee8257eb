"""Where settings come from: flag, then environment, then TOML file, then default. Knows no command."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from ..core.config import explain
from ..core.errors import ConfigError
from .settings import ENV_PREFIX, Settings, env_name, flag_name, reason

CONFIG_ENV = f"{ENV_PREFIX}CONFIG"


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """`flags` holds what the command line gave, by field name. Raises ConfigError, naming where a bad value stands."""
    path = config_file or default_config_file()
    file_values = {} if path is None else read_config_file(path)

    class Sourced(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, file_values)

    try:
        return Sourced(**flags)
    except ValidationError as error:
        raise ConfigError(_explain(error, flags, path)) from error


def default_config_file() -> Path | None:
    path = Path("~/.config/vllm-mlx/config.toml").expanduser()
    return path if path.is_file() else None


def read_config_file(path: Path) -> dict[str, Any]:
    """Values by field name; keys may be written with dashes, as flags are. Raises ConfigError."""
    try:
        values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the config file {path}: {reason(error)}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from error
    named = {key.replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in Settings.model_fields:
            raise ConfigError(f"Unknown setting `{key}` in {path}.{did_you_mean(key)}")
    return named


def unknown_variables() -> list[str]:
    """A line for each environment variable that looks like a setting and is none: a misspelt one would do nothing."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIX) and name != CONFIG_ENV]
    keys = {name: name.removeprefix(ENV_PREFIX).lower() for name in sorted(names)}
    return [
        f"The environment variable {name} is no setting and has no effect.{did_you_mean(key, env_name)}"
        for name, key in keys.items()
        if key not in Settings.model_fields
    ]


def did_you_mean(key: str, spell: Any = str) -> str:
    nearest = difflib.get_close_matches(key, Settings.model_fields, n=1)
    return f" Did you mean `{spell(nearest[0])}`?" if nearest else ""


def _explain(error: ValidationError, flags: Mapping[str, Any], path: Path | None) -> str:
    """The first fault on one line."""
    fault = error.errors(include_url=False)[0]
    name = str(fault["loc"][0])
    value = "" if name == "api_key" else f", got {fault['input']!r}"
    return f"{_origin(name, flags, path)}{explain(fault)}{value}."


def _origin(name: str, flags: Mapping[str, Any], path: Path | None) -> str:
    if name in flags:
        return flag_name(name)
    return env_name(name) if os.environ.get(env_name(name)) else f"`{name}` in {path}"
