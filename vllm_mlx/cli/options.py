"""Sources of settings: flags, then environment variables, then a TOML file. Knows no setting by name."""

import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from ..core.config import explain
from ..core.errors import ConfigError
from .completion import downloaded
from .help import show_all
from .settings import (
    ENV_PREFIX,
    FORMS,
    NAMES,
    OF_A_MODEL,
    POSITIONAL,
    AllSettings,
    ListedModel,
    Settings,
    env_name,
    flag_name,
    help_text,
    settings_fields,
    takes_several,
)
from .terminal import WrongFlag
from .values import reason

CONFIG_ENV = f"{ENV_PREFIX}CONFIG"
SERVICE_FILE = ".config/vllm-mlx/service.toml"  # below the home folder of the service's user
SERVICE_KEYS = ".config/vllm-mlx/service-keys.toml"
_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", SecretStr: "TEXT", Path: "FILE"}
_IN_TABLE = {"served_model_name": "`name` and `aliases`"}  # settings of an only model that a table writes otherwise
_ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_ENV,
        metavar="FILE",
        show_default=False,
        help="TOML file of settings. Default: `~/.config/vllm-mlx/config.toml`, if it exists.",
    ),
]
_HelpAll = Annotated[
    bool | None,
    typer.Option("--help-all", callback=show_all, is_eager=True, help="Show all settings, by group, and exit."),
]


def load_settings(
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    *,
    key_file: Path | None = None,
    with_variables: bool = True,
) -> Settings:
    """Join the values of all origins. `flags` holds those of the command line by setting name.

    `key_file` is a second file of settings. Without `with_variables`, the environment is not read. Raises ConfigError,
    which names the origin of a bad value; for a flag it is WrongFlag.
    """
    path = config_file or _default_config_file()
    file = {} if path is None else _read_config_file(path)
    if key_file is not None:
        file |= _read_config_file(key_file)
    variables = _variables() if with_variables else {}
    given = {**file, **variables, **flags}

    def origin(name: str) -> str:
        if name == "models":
            return "the command line" if name in flags else f"`[[models]]` in {path}"
        if name in POSITIONAL and name in flags:
            return name.upper()
        return flag_name(name) if name in flags else env_name(name) if name in variables else f"`{name}` in {path}"

    _refuse_doubt(given, file, flags, origin)
    try:
        settings = AllSettings(**given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name, *inside = map(str, fault["loc"])
        if name == "models" and len(inside) < 2:
            raise ConfigError(
                f"`models` in {path} must be a list of tables. Write `[[models]]` above the settings of each model."
            ) from error
        place = origin(name) if len(inside) < 2 else f"`{inside[1]}` in table {int(inside[0]) + 1} of {origin(name)}"
        if fault["type"] == "extra_forbidden":
            outside = " Write it above the tables, because it is the server's."
            hint = outside if inside[-1] in NAMES else _did_you_mean(inside[-1], names=ListedModel.model_fields)
            hint = f" Write {_IN_TABLE[inside[-1]]} instead." if inside[-1] in _IN_TABLE else hint
            raise ConfigError(f"{place} is not a setting of a model.{hint}") from error
        value = "" if name == "api_key" or fault["type"] == "missing" else f", got {fault['input']!r}"
        kind = WrongFlag if name in flags else ConfigError
        raise kind(f"{place}{explain(fault)}{value}.") from error
    first, *_ = settings.each()
    return first.model_copy(update={"models": settings.models}) if settings.models else settings


def _refuse_doubt(
    given: Mapping[str, Any], file: Mapping[str, Any], flags: Mapping[str, Any], origin: Callable[[str], str]
) -> None:
    """Raise ConfigError if several models are listed, and one is also described outside the list."""
    if "models" not in given:
        return
    if given["models"] == []:
        raise ConfigError(f"{origin('models')} lists no model. Write a table for each, or leave `models` out.")
    for name in sorted(OF_A_MODEL & given.keys()):
        other = f"write {_IN_TABLE.get(name, 'the setting')} in the table of its model"
        other = "list the models in a settings file" if "models" in flags else other
        raise ConfigError(
            f"{origin(name)} describes one model, and {origin('models')} lists models. Leave one of the two out, or "
            f"{other}."
        )
    if "models" in file and "models" in flags:
        raise ConfigError("The command line and `[[models]]` in the config file both list models. Leave one list out.")


def read_models(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of one or several MODEL or NAME=MODEL on the command line."""
    models = []
    for text in texts:
        name, is_named, model = text.partition("=")
        if not is_named or Path(text).expanduser().is_dir():
            name, model = "", text
        elif not (name and model):
            lacking = "model after" if name else "name before"
            raise WrongFlag(f"`{text}` has no {lacking} `=`. Write NAME=MODEL, or MODEL alone.")
        models.append({"model": model} | ({"name": name} if name else {}))
    if len(models) > 1:
        return {"models": models}
    [only] = models
    return {"model": only["model"]} | ({"served_model_name": [only["name"]]} if "name" in only else {})


def server_settings() -> Settings:
    """Return the settings with which a server is looked for. Raises ConfigError.

    The environment wins over the files of this user's service, which replace the config file.
    """
    return own_service() or load_settings({})


def own_service() -> Settings | None:
    """Return the settings of this user's service; None if there is none, or if the environment names another file."""
    return None if os.environ.get(CONFIG_ENV) else service_settings(Path.home(), with_variables=True)


def service_settings(home: Path, *, with_variables: bool = False) -> Settings | None:
    """Return the settings that a service was installed with. Raises ConfigError.

    Returns None if the user with this home folder has none.
    """
    file = home / SERVICE_FILE
    if not file.exists():
        return None
    return load_settings({}, file, key_file=home / SERVICE_KEYS, with_variables=with_variables)


def _default_config_file() -> Path | None:
    if named := os.environ.get(CONFIG_ENV):
        return Path(named)
    path = Path("~/.config/vllm-mlx/config.toml").expanduser()
    return path if path.is_file() else None


def _read_config_file(path: Path) -> dict[str, Any]:
    """Return values by setting name; the file may write keys with dashes, as flags are. Raises ConfigError."""
    try:
        values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the config file {path}: {reason(error)}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from error
    named: dict[str, Any] = _with_underscores(values)
    for key in [key for key in named if key not in {*NAMES, "models"}]:
        raise ConfigError(f"Unknown setting `{key}` in {path}.{_did_you_mean(key)}")
    return named


def _with_underscores(values: Any) -> Any:
    """Write the keys of a table, and of the tables in its lists, as settings are named."""
    match values:
        case dict():
            return {key.replace("-", "_"): _with_underscores(value) for key, value in values.items()}
        case list():
            return [_with_underscores(value) for value in values]
        case _:
            return values


def _variables() -> dict[str, str]:
    """Return values by setting name. The case of a variable's name does not matter; empty variables are left out."""
    given = {name.upper(): value for name, value in os.environ.items() if value}
    return {name: given[env_name(name)] for name in NAMES if env_name(name) in given}


def unknown_variables() -> list[str]:
    """Return a warning for each environment variable that is named like a setting and is not one."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIX) and name != CONFIG_ENV]
    keys = {name: name.removeprefix(ENV_PREFIX).lower() for name in sorted(names)}
    return [
        f"The environment variable {name} is not a setting and has no effect.{_did_you_mean(key, env_name)}"
        for name, key in keys.items()
        if key not in NAMES
    ]


def _did_you_mean(key: str, spell: Callable[[str], str] = str, names: Collection[str] = NAMES) -> str:
    nearest = difflib.get_close_matches(key, sorted(names), n=1)
    return f" Did you mean `{spell(nearest[0])}`?" if nearest else ""


def takes_settings(command: Callable[..., None], names: Collection[str] = NAMES) -> Callable[..., None]:
    """Turn `command(settings, ...)` into a Typer command with a parameter for each setting, `--config`, `--help-all`.

    `names` are the settings that have a parameter.

    Typer passes values on as strings; only the settings validate them, for every origin.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(config: Path | None = None, help_all: bool | None = None, **values: Any) -> None:
        rest = {parameter.name: values.pop(parameter.name) for parameter in own}
        given = {name: value for name, value in values.items() if value not in (None, [])}
        if "model" in given:
            named = read_models(given.pop("model"))
            for name in named.keys() & given.keys():
                raise WrongFlag(f"NAME=MODEL gives a name, and so does {flag_name(name)}. Leave one of the two out.")
            given |= named
        command(load_settings(given, config), **rest)

    annotations = {name: _annotation(name, field, panel) for name, field, panel in settings_fields() if name in names}
    annotations |= {"config": _ConfigFile, "help_all": _HelpAll}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    annotations |= {parameter.name: parameter.annotation for parameter in own}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = annotations
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _annotation(name: str, field: FieldInfo, panel: str) -> Any:
    flag = flag_name(name)
    default = f" Default: {text}." if (text := default_text(field)) else ""
    several = " Repeat it for more." if takes_several(field) else ""
    show: dict[str, Any] = {"help": f"{help_text(name)}{several}{default}", "show_default": False}
    if name in POSITIONAL:
        return Annotated[list[str] | None, typer.Argument(metavar=name.upper(), autocompletion=downloaded, **show)]
    if field_kind(field) is bool:
        switch = typer.Option(f"{flag}/--no-{flag.removeprefix('--')}", rich_help_panel=panel, **show)
        return Annotated[bool | None, switch]
    option = typer.Option(flag, metavar=metavar(name, field), rich_help_panel=panel, **show)
    return Annotated[list[str] | None if takes_several(field) else str | None, option]


def default_text(field: FieldInfo) -> str:
    """Write the default as the help shows it. It is empty if the help text has to explain the default."""
    match field.default:
        case None | () | False:
            return ""
        case tuple(values):
            return ", ".join(values)
        case float(value):
            return f"{value:g}"
        case value:
            return str(value).lower() if value is True else str(value)


def field_kind(field: FieldInfo) -> Any:
    """Return the type of one value: for `tuple[X, ...]` and `X | None`, it is X."""
    kind = field.annotation
    return get_args(kind)[0] if get_origin(kind) in (tuple, Union, UnionType) else kind


def metavar(name: str, field: FieldInfo) -> str:
    """Return the word for a setting's value in help and docs."""
    kind = field_kind(field)
    if name in FORMS:
        return FORMS[name].metavar
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS[kind]
