"""What each command takes: flags, environment variables, TOML keys, kinds and defaults; and the words of its help."""

from collections.abc import Iterator
from typing import Any, get_args

import typer
from typer.core import TyperArgument

from vllm_mlx.cli.main import make_app
from vllm_mlx.cli.settings import env_name, settings_fields


def commands() -> Iterator[tuple[str, Any]]:
    yield from _below("vllm-mlx", typer.main.get_command(make_app()))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child in getattr(command, "commands", {}).values():
        yield from _below(f"{name} {child.name}", child)


def parameters() -> dict[str, dict[str, Any]]:
    """Each parameter of each command, by its spellings."""
    return {
        name: {_spelling(parameter): _described(parameter) for parameter in command.params}
        for name, command in commands()
    }


def settings() -> dict[str, dict[str, Any]]:
    """Each setting by its TOML key."""
    return {
        name: {"variable": env_name(name), "default": _plain(field.get_default(call_default_factory=True))}
        for name, field, _ in settings_fields()
    }


def help_texts() -> dict[str, dict[str, str]]:
    return {
        name: {
            "": " ".join((command.help or "").split()),
            **{_spelling(parameter): getattr(parameter, "help", None) or "" for parameter in command.params},
        }
        for name, command in commands()
    }


def _spelling(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return str(parameter.metavar or parameter.name).upper()
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def _described(parameter: Any) -> dict[str, Any]:
    return {
        "kind": parameter.metavar or _kind(parameter),
        "variable": parameter.envvar,
        "default": _plain(parameter.default),
        "several": parameter.multiple or parameter.nargs == -1,
    }


def _kind(parameter: Any) -> str:
    """Typer's later releases keep the annotation, the earlier ones click's own type."""
    described = getattr(parameter, "type_descriptor", None)
    if described is None:
        return str(parameter.type.name)
    kind = (*get_args(described.annotation), described.annotation)[0]
    return {str: "text", int: "integer", bool: "boolean"}.get(kind, kind.__name__.lower())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
