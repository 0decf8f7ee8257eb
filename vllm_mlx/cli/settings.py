"""Every setting of the server, once. A field is a flag, an environment variable, a TOML key and a line of the docs.

Knows what each layer wants to be told, and none of the layers' insides.
"""

import dataclasses
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..core.config import CacheReasoning, EngineConfig, SamplingDefaults
from ..core.errors import ConfigError, InvalidParameter
from ..core.request import SamplingParams
from .memory import MemoryAmount, parse_memory

ENV_PREFIX = "VLLM_MLX_"
DEMO_MODEL = "demo"
POSITIONAL = frozenset({"model"})  # given without a flag


class Panel(StrEnum):
    """Headings under which the help and the docs list the settings, in this order."""

    MODEL = "Model"
    SERVER = "Server"
    ENGINE = "Engine and memory"
    SAMPLING = "Sampling defaults"


def split_commas(value: object) -> object:
    """Environment variables hold several values as `a,b`."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def read_template(value: object) -> object:
    """A template is given as text, or as the file that holds it. No template is without a brace, no file has one."""
    if not isinstance(value, str) or "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the template file {value}: {reason(error)}") from error


def reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "it cannot be opened") if isinstance(error, OSError) else "it is not UTF-8 text"


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
SeveralSecrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_commas)]
Memory = Annotated[MemoryAmount | None, BeforeValidator(parse_memory)]
Template = Annotated[str | None, BeforeValidator(read_template)]


def setting(panel: Panel, default: Any, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, json_schema_extra={"panel": panel}, **limits)


def engine_setting(panel: Panel, name: str, description: str) -> Any:
    """A setting whose default is the engine's own."""
    [default] = [field.default for field in dataclasses.fields(EngineConfig) if field.name == name]
    return setting(panel, default, description)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    model: str = setting(
        Panel.MODEL, DEMO_MODEL, "Folder or Hugging Face id of a checkpoint. `demo` is the small bundled one."
    )
    served_model_name: Several = setting(
        Panel.MODEL, (), "Name clients ask for; the first is the one in replies. Default: the model's own name."
    )
    revision: str | None = engine_setting(Panel.MODEL, "revision", "Branch, tag or commit on Hugging Face.")
    trust_remote_code: bool = engine_setting(
        Panel.MODEL, "trust_remote_code", "Run Python code that comes with the checkpoint's tokenizer."
    )
    chat_template: Template = setting(
        Panel.MODEL, None, "Jinja chat template, as text or as a file, in place of the checkpoint's."
    )
    enable_thinking: bool | None = setting(
        Panel.MODEL, None, "Whether a model that can reason does so when the request does not say. Default: it does."
    )
    reasoning_parser: str = engine_setting(
        Panel.MODEL, "reasoning_parser", "Format of the model's reasoning. `auto` reads it off the chat template."
    )
    tool_call_parser: str = engine_setting(
        Panel.MODEL, "tool_call_parser", "Format of the model's tool calls. `auto` reads it off the chat template."
    )

    host: str = setting(Panel.SERVER, "127.0.0.1", "Address to listen on. `0.0.0.0` opens the server to the network.")
    port: int = setting(Panel.SERVER, 8000, "Port to listen on. 0 takes a free one.", ge=0, le=65535)
    api_key: SeveralSecrets = setting(
        Panel.SERVER, (), "Key that clients must send, as `Authorization: Bearer` or `x-api-key`. Default: none asked."
    )
    cors_origin: Several = setting(
        Panel.SERVER, (), "Origin whose web pages may call the server; `*` for any. Default: none."
    )
    drain_s: float = setting(Panel.SERVER, 5.0, "Seconds that running replies get to finish after Ctrl-C.", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        Panel.SERVER, "info", "How much is logged. Prompts and replies never are."
    )

    max_model_len: int | None = setting(
        Panel.ENGINE, None, "Longest prompt plus reply, in tokens. Default: the checkpoint's, or what memory holds."
    )
    max_num_seqs: int = engine_setting(
        Panel.ENGINE, "max_num_seqs", "Sequences that run at once; further ones wait in line."
    )
    memory_budget: Memory = setting(
        Panel.ENGINE,
        None,
        "Memory for weights and all state: bytes (`24GB`) or a share of the machine's (`0.7`). Default: by machine.",
    )
    max_stall_ms: float = engine_setting(
        Panel.ENGINE, "max_stall_ms", "Longest pause of running replies, in milliseconds, while a prompt is read."
    )
    max_prefill_chunk: int = engine_setting(
        Panel.ENGINE, "max_prefill_chunk", "Prompt tokens computed in one go while no reply is running."
    )

    prefix_cache: bool = engine_setting(
        Panel.ENGINE, "prefix_cache", "Keep the state of prompts and replies: what begins alike is computed once."
    )
    cache_memory: Memory = setting(
        Panel.ENGINE,
        None,
        "Memory the prefix cache may take, within the budget: bytes or a share. Default: what running replies leave.",
    )
    snapshot_every: int = engine_setting(
        Panel.ENGINE,
        "snapshot_every",
        "Prompt tokens between copies of state while a long prompt is read, so that an abort loses little; 0: none.",
    )
    cache_reasoning: CacheReasoning = engine_setting(
        Panel.ENGINE,
        "cache_reasoning",
        "What stays cached of a reply that reasoned: what the next turn will contain (`auto`), all, or nothing.",
    )

    temperature: float | None = setting(
        Panel.SAMPLING, None, "0 always takes the likeliest token. These defaults apply where a request says nothing."
    )
    top_p: float | None = setting(Panel.SAMPLING, None, "Keep the likeliest tokens that make up this probability.")
    top_k: int | None = setting(Panel.SAMPLING, None, "Keep this many of the likeliest tokens; 0 keeps all.")
    min_p: float | None = setting(
        Panel.SAMPLING, None, "Keep tokens at least this likely, relative to the likeliest one."
    )
    repetition_penalty: float | None = setting(
        Panel.SAMPLING, None, "Above 1, tokens that already occurred become less likely."
    )
    max_tokens: int | None = setting(Panel.SAMPLING, None, "Longest reply, in tokens. Default: up to the context.")

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """A local folder is served under its own name, not its path."""
        if self.served_model_name:
            return self.served_model_name
        folder = Path(self.model).expanduser()
        return (folder.resolve().name,) if folder.is_dir() else (self.model,)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(key.get_secret_value() for key in self.api_key)

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError for a value the engine refuses."""
        same_name = {field.name for field in dataclasses.fields(EngineConfig)} & set(type(self).model_fields)
        return EngineConfig(
            **{name: getattr(self, name) for name in same_name},
            memory_budget_bytes=_bytes(self.memory_budget),
            cache_memory_bytes=_bytes(self.cache_memory),
            defaults=self.sampling_defaults(),
        )

    def sampling_defaults(self) -> SamplingDefaults:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingDefaults)}
        try:
            SamplingParams(**values)  # a default has the limits of the request's field
        except InvalidParameter as error:
            raise ConfigError(f"{flag_name(error.param or '')}: {error.message}") from error
        return SamplingDefaults(**values)


def _bytes(amount: MemoryAmount | None) -> int | None:
    return None if amount is None else amount.to_bytes(physical_memory())


def settings_fields() -> Iterator[tuple[str, FieldInfo, Panel]]:
    """Name, field and panel of every setting, in the order of help and docs."""
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict), "a setting is declared through setting()"
        yield name, field, Panel(str(field.json_schema_extra["panel"]))


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
