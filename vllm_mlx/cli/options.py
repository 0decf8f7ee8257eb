"""Turns the settings into the parameters of a Typer command, so that no flag is listed twice. Knows none by name."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from .settings import POSITIONAL, Panel, Settings, flag_name, help_text, settings_fields
from .sources import CONFIG_ENV, load_settings

_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", SecretStr: "TEXT", Path: "FILE"}
_ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_ENV,
        metavar="FILE",
        show_default=False,
        help="TOML file of settings. Default: `~/.config/vllm-mlx/config.toml`, where there is one.",
    ),
]


def takes_settings(command: Callable[[Settings], None]) -> Callable[..., None]:
    """Gives `command(settings)` one parameter for each setting, and `--config`.

    Typer hands values on as the strings they are; only the settings judge them, wherever they come from.
    """

    def run(config: Path | None = None, **values: Any) -> None:
        command(load_settings({name: value for name, value in values.items() if value not in (None, [])}, config))

    config_parameter = _parameter("config", _ConfigFile)
    parameters = [_parameter(name, _annotation(name, field, panel)) for name, field, panel in settings_fields()]
    run.__signature__ = inspect.Signature([*parameters, config_parameter])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, config_parameter]}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(name: str, field: FieldInfo, panel: Panel) -> Any:
    kind = field_kind(field)
    flag = flag_name(name)
    show: dict[str, Any] = {"help": _help(field), "show_default": False}
    if name in POSITIONAL:
        return Annotated[str | None, typer.Argument(metavar=name.upper(), **show)]
    if kind is bool:
        return Annotated[
            bool | None, typer.Option(f"{flag}/--no-{name.replace('_', '-')}", rich_help_panel=panel, **show)
        ]
    option = typer.Option(flag, metavar=metavar(kind), rich_help_panel=panel, **show)
    return Annotated[list[str] | None if takes_several(field) else str | None, option]


def _help(field: FieldInfo) -> str:
    default = default_text(field)
    several = " Repeat it for more." if takes_several(field) else ""
    return f"{help_text(field)}{several}" + (f" Default: {default}." if default else "")


def default_text(field: FieldInfo) -> str:
    """Empty where the description has to explain the default."""
    if field.default is None or field.default == () or field.default is False:
        return ""
    if isinstance(field.default, tuple):
        return ", ".join(field.default)
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def field_kind(field: FieldInfo) -> Any:
    """The type of one value: `tuple[X, ...]` and `X | None` are X."""
    return _strip(field.annotation)


def _strip(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0]
    return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation


def takes_several(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def metavar(kind: Any) -> str:
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, "SIZE")
