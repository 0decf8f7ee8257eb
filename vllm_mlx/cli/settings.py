"""Every setting of the server. A setting is a flag, an environment variable, a TOML key and a line of the docs.

Most are declared by the layer that uses them, in a `SettingsGroup`. The ones that only the commands use are declared
here. `PANELS` lists them all.
"""

import ipaddress
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo

from ..core import errors
from ..core.catalogue import Catalogue, Entry
from ..core.config import EngineConfig, MediaConfig, ModelConfig, SamplingDefaults, SettingsGroup
from ..core.errors import ConfigError, InvalidParameter, about
from ..core.request import RequestLimits, SamplingParams
from ..server.config import MAX_BODY_BYTES, ConnectionLimits, ServerConfig
from ..util.tenants import APIKey
from .values import (
    DEFAULT_MEDIA_LIMITS,
    Form,
    all_keys,
    media_limits,
    read_bytes,
    read_disk,
    read_list,
    read_media_limits,
    read_memory,
    read_prompts,
    read_reasoning_strings,
    read_speculative_config,
    read_template,
)

ENV_PREFIX = "VLLM_MLX_"
T = TypeVar("T", bound=BaseModel)
POSITIONAL = frozenset({"model"})  # given without a flag
GROUPS: tuple[type[SettingsGroup], ...] = (
    ModelConfig,
    EngineConfig,
    MediaConfig,
    SamplingDefaults,
    ServerConfig,
    ConnectionLimits,
    RequestLimits,
)
PANELS: Mapping[str, tuple[str, ...]] = {  # the headings of help and docs, and the settings below each
    "Model": (
        "model", "models_from", "served_model_name", "revision", "trust_remote_code", "text_only", "chat_template",
        "enable_thinking", "reasoning_parser", "tool_grammar", "undeclared_calls", "reasoning_config",
        "tool_call_parser",
    ),
    "Embedding and reranking": ("task", "pooling", "normalize", "prompts"),
    "Server": (
        "host", "port", "api_key", "api_key_file", "admin_key_file", "metrics_open", "insecure", "allowed_host",
        "cors_origin", "separate_reasoning", "messages_thinking", "web_search", "unknown_fields", "keep_alive_s",
        "drain_s", "log_level", "record_requests",
    ),
    "Limits": (
        "max_body", "max_queue", "max_queue_s", "max_model_wait_s", "max_request_s", "max_prepare_s",
        "watchdog_s", "max_requests_per_minute", "max_messages", "max_tools", "max_schema_bytes", "max_choices",
        "max_connections", "slow_client_s",
    ),
    "Engine and memory": (
        "max_model_len", "max_num_seqs", "memory_budget", "wired", "idle_unload_s", "keep_awake", "max_stall_ms",
        "max_prefill_chunk", "max_pixels", "num_draft_tokens", "draft_model", "speculative_config", "prefix_cache",
        "repeatable", "cache_memory", "snapshot_every", "cache_reasoning", "cache_thinking_tokens", "idle_prefill",
        "cache_disk", "cache_dir", "cache_disk_daily",
    ),
    "Several Macs": (
        "tensor_parallel_size", "worker_port", "worker_host", "secret_file", "rdma_devices", "join",
    ),
    "Images and videos": (
        "limit_mm_per_prompt", "max_image_bytes", "max_video_bytes", "max_image_pixels", "max_video_pixels",
        "max_decode_s", "max_request_pixels", "media_timeout_s", "max_media_redirects", "media_content_type",
        "allow_private_media", "media_root", "media_cache_bytes",
    ),
    "Documents": (
        "document_pages", "max_document_bytes", "max_document_pages", "max_document_chars", "max_document_s",
    ),
    "Sampling defaults": (
        "default_thinking_token_budget", "max_silent_tokens", *(each.name for each in fields(SamplingDefaults)),
    ),
}  # fmt: skip
COMMON = frozenset({  # the settings in `--help`; `--help-all` shows every setting
    "served_model_name", "text_only", "chat_template", "enable_thinking", "host", "port", "api_key", "api_key_file",
    "log_level", "max_model_len", "max_num_seqs", "memory_budget", "cache_memory", "cache_disk", "cache_dir",
    "temperature", "max_tokens", "models_from",
})  # fmt: skip

_BYTES = Form("SIZE", "Write bytes, such as `20MB`.", read_bytes)
_MEMORY = Form("SIZE", "Write bytes, such as `24GB`, or a share of the machine's memory, such as `0.7`.", read_memory)
FORMS: Mapping[str, Form] = {
    "memory_budget": _MEMORY,
    "cache_memory": _MEMORY,
    "cache_disk": Form("SIZE|0", "Write bytes, such as `100GB`.", read_disk),
    "cache_disk_daily": Form("SIZE", "Write bytes, such as `20GB`.", read_disk),
    "cache_dir": Form("DIR"),
    "join": Form("HOST:PORT"),
    "models_from": Form("hub|FOLDER", read=read_list),
    "record_requests": Form("FILE"),
    "num_draft_tokens": Form("auto|0-7"),
    "speculative_config": Form("JSON", read=read_speculative_config),
    "max_body": Form("SIZE", "Write bytes, such as `64MiB`.", read_memory),
    "max_image_bytes": _BYTES,
    "max_video_bytes": _BYTES,
    "max_document_bytes": _BYTES,
    "media_cache_bytes": _BYTES,
    "chat_template": Form("TEXT", "Write the template, or the name of its file.", read_template),
    "reasoning_config": Form(
        "JSON",
        'Write `{"reasoning_start_str": "<think>", "reasoning_end_str": "That will do.</think>"}`.',
        read_reasoning_strings,
    ),
    "prompts": Form("JSON", 'Write `{"query": "query: ", "document": "passage: "}`.', read_prompts),
    "limit_mm_per_prompt": Form("LIMITS", read=read_media_limits),
}


class _Values(BaseModel):
    """Reads values as people write them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> object:
        name = str(info.field_name)
        if any(isinstance(part, str) and not part.strip() for part in (value if isinstance(value, list) else [value])):
            raise ValueError("it is empty; write a value, or leave it out")
        if name in FORMS:
            return FORMS[name].read(value)
        return read_list(value) if takes_several(cls.model_fields[name]) else value


class OwnModel(_Values):
    """A table of `[[models]]`. `ListedModel` adds the settings that describe a model."""

    model: str
    name: str | None = None  # by default, the model's own name
    aliases: tuple[str, ...] = ()
    match: tuple[str, ...] = ()  # patterns of further names
    pin: bool = Field(default=False, strict=True)
    speculative_config: str | None = None

    def values(self) -> dict[str, Any]:
        """Return the settings that the table gives, as they would be given for an only model."""
        given = {name: getattr(self, name) for name in self.model_fields_set & OF_A_MODEL}
        names = (self.name or _own_name(self.model), *self.aliases)
        return given | {"served_model_name": names} if self.name or self.aliases else given


class Settings(_Values):
    """The settings that only the commands use. `AllSettings` adds the settings of the layers below."""

    models: tuple[OwnModel, ...] = ()
    """Several models, each with its own settings. The settings outside describe the first."""
    model: str = "demo"
    """Folder or Hugging Face id of a checkpoint; `demo` is the small bundled one."""
    models_from: tuple[str, ...] = ()
    """Serve every checkpoint that lies in this folder, by its name: in Hugging Face's cache and LM Studio's folders
    (`hub`), or in a folder that holds checkpoints. Each is loaded when a request asks for it first."""
    served_model_name: tuple[str, ...] = ()
    """Name by which clients ask for the model; replies carry the first name. Default: the model's own name."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` opens the server to the network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    api_key: tuple[SecretStr, ...] = ()
    """Key that clients must send, as `Authorization: Bearer` or `x-api-key`. Default: no key is needed."""
    api_key_file: Path | None = None
    """File of API keys, one on each line, as `NAME:KEY`. Their holders share no cached state."""
    admin_key_file: Path | None = None
    """File of keys in the same form, whose holders may also load and unload models, and cancel requests and clear
    cached state of others."""
    insecure: bool = False
    """Listen beyond this machine without a key: anybody who reaches the port may use the server."""
    allowed_host: tuple[str, ...] = ()
    """Host name of the server for clients, in addition to its addresses, localhost and this machine's own name; `*`
    allows any. Other names are refused, because a web page could point its own name at this server."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call the server; `*` allows any. Default: no web page may."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that running replies get to finish after Ctrl-C, SIGTERM or SIGHUP."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged. Prompts and replies are never logged."""
    max_body: int | None = None
    """Largest request body, images included. Default: 256 MiB."""
    slow_client_s: float = Field(default=30.0, gt=0)
    """Longest time, in seconds, until a request's headers have arrived, until its body has (long bodies get more), and
    until a client that has stopped reading reads again."""
    memory_budget: int | None = None
    """Memory for the weights and all state. Default: computed from the machine's memory."""
    speculative_config: str | None = None
    """Number of draft tokens in vLLM's JSON form, with the method `ngram` or `mtp` and the draft `model`."""
    cache_memory: int | None = None
    """Memory of the prefix cache, within the budget. Default: all that running replies leave free."""
    cache_thinking_tokens: bool = False
    """Another name for `--cache-reasoning keep`."""
    cache_disk: int | None = None
    """Size of the prefix cache on disk, which keeps conversations for the next start; 0 turns it off. Default: a tenth
    of the space that is free while it is empty."""
    cache_disk_daily: int | None = None
    """Most bytes that are written to the prefix cache on disk in one day; with 0, the cache is only read. Default: a
    fifth of the disk."""
    worker_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the workers of `--tensor-parallel-size` join; below 32768, since systems use higher ones."""
    worker_host: str = "127.0.0.1"
    """This Mac's address on the network of the workers, which should be a separate network: intermediate
    results travel there unencrypted."""
    secret_file: Path | None = None
    """File with the secret that server and workers prove to each other: the same on all Macs, with mode 600."""
    rdma_devices: Path | None = None
    """JSON file of each Mac's RDMA devices, as for MLX_IBV_DEVICES, to compute over RDMA. Default: over TCP."""
    join: str | None = None
    """Server that a worker joins: its `--worker-host` and `--worker-port`. Only `vllm-mlx worker` and a service that is
    a worker take it."""
    limit_mm_per_prompt: str = DEFAULT_MEDIA_LIMITS
    """Most images, videos and documents of one request."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Return the names that clients may ask for. A local folder is served under its own name, without its path."""
        return self.served_model_name or (_own_name(self.model),)

    def each(self) -> list["Settings"]:
        """Return the settings of each model, as if it were the only one."""
        kept = {name: getattr(self, name) for name in self.model_fields_set - OF_A_MODEL - {"models"}}
        return [type(self).model_construct(**kept, **listed.values()) for listed in self.models] or [self]

    def catalogue(self) -> Catalogue:
        """Return the models that are served. Raises ConfigError."""
        if self.models_from and not self.models and "model" not in self.model_fields_set:
            for name in sorted(_OF_ONE & self.model_fields_set):
                raise ConfigError(f"{flag_name(name)} describes one model. Name the model, or leave it out.")
            return Catalogue((), self.models_from, self.engine_config())
        entries = []
        for one, table in zip(self.each(), self.models or (None,), strict=True):
            name, *aliases = one.served_model_names
            with about(name if len(self.models) > 1 else None):
                config = one.engine_config()
            more: dict[str, Any] = {} if table is None else {"patterns": table.match, "pin": table.pin}
            entries.append(Entry(config=config, name=name, aliases=tuple(aliases), **more))
        return Catalogue(tuple(entries), self.models_from)

    @property
    def keys(self) -> tuple[APIKey, ...]:
        """Return all API keys, from flags and files. Raises ConfigError for a file that cannot be used."""
        return all_keys((key.get_secret_value() for key in self.api_key), self.api_key_file, self.admin_key_file)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the keys that ordinary clients send. Raises ConfigError."""
        return tuple(key.secret for key in self.keys if not key.is_admin)

    def engine_config(self) -> EngineConfig:
        """Return the settings of the engine. Raises ConfigError for a value that it refuses."""
        values = self._values_of(EngineConfig)
        if self.cache_thinking_tokens:
            if values["cache_reasoning"] == "drop":
                raise ConfigError("--cache-thinking-tokens and --cache-reasoning drop contradict each other.")
            values["cache_reasoning"] = "keep"
        if self.speculative_config is not None:
            given = json.loads(self.speculative_config)
            asked = {"num_draft_tokens": given.get("num_speculative_tokens", "auto")}
            if "model" in given:
                asked["draft_model"] = given["model"]
            for name, value in asked.items():
                if name in self.model_fields_set and values[name] != value:
                    raise ConfigError(
                        f"{flag_name(name)} and --speculative-config contradict each other. Leave one out."
                    )
            values |= asked
        limits: dict[str, Any] = {f"max_{kind}s": most for kind, most in media_limits(self.limit_mm_per_prompt).items()}
        return EngineConfig(
            **values,
            cache_disk_bytes=self.cache_disk,
            cache_disk_daily_bytes=self.cache_disk_daily,
            memory_budget_bytes=self.memory_budget,
            cache_memory_bytes=self.cache_memory,
            defaults=self._sampling_defaults(),
            media=MediaConfig(**limits, **self._values_of(MediaConfig)),
        )

    def server_config(self) -> ServerConfig:
        """Return the settings of the HTTP server. Raises ConfigError for a value that it refuses."""
        patience_s = self.slow_client_s
        return ServerConfig(
            **self._values_of(ServerConfig),
            models=self.catalogue(),
            api_keys=self.keys,
            host_names=self.allowed_host if is_local(self.host) else (self.host, *self.allowed_host),
            cors_origins=self.cors_origin,
            limits=RequestLimits(**self._values_of(RequestLimits)),
            connections=ConnectionLimits(**self._values_of(ConnectionLimits), head_s=patience_s, take_s=patience_s),
            body_s=patience_s,
            max_body_bytes=self.max_body or MAX_BODY_BYTES,
        )

    def _sampling_defaults(self) -> SamplingDefaults:
        values = self._values_of(SamplingDefaults)
        try:
            SamplingParams(**values)  # a default has the limits of the request's field
            if values["max_tokens"] == 0:
                raise InvalidParameter("`max_tokens` must be at least 1.", param="max_tokens")
        except InvalidParameter as error:
            raise ConfigError(f"{flag_name(error.param or '')}: {error.message}") from error
        return SamplingDefaults(**values)

    def _values_of(self, group: type[SettingsGroup]) -> dict[str, Any]:
        """Return the settings that `group` declares, by name."""
        return {name: getattr(self, name) for name in group.__pydantic_fields__.keys() & NAMES}


def _own_name(model: str) -> str:
    """Return the name of a model that has no other: of a folder without its path, else as it was given."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def takes_several(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


NAMES = frozenset(name for names in PANELS.values() for name in names)
_OF_ONE = {"served_model_name", "revision", "chat_template", "draft_model", "trust_remote_code"}  # checkpoint alone
OF_A_MODEL = NAMES & {
    *ModelConfig.__pydantic_fields__, *SamplingDefaults.__pydantic_fields__, "served_model_name", "speculative_config",
}  # fmt: skip
"""The settings that describe a model, and not the process. Each of several models has its own."""


def _with_declared(name: str, base: type[T], names: Collection[str], **more: Any) -> type[T]:
    """Add the settings that the layers below declare, with their types, defaults, ranges and help texts."""
    declared = {one: field for group in reversed(GROUPS) for one, field in group.__pydantic_fields__.items()}
    own = sorted(set(names) - Settings.model_fields.keys())
    fields: dict[str, Any] = {one: (declared[one].annotation, declared[one]) for one in own}
    return create_model(name, __base__=base, **fields, **more)


ListedModel = _with_declared("ListedModel", OwnModel, OF_A_MODEL)
AllSettings = _with_declared("AllSettings", Settings, NAMES, models=(tuple[ListedModel, ...], ()))  # type: ignore[valid-type]


def settings_fields() -> Iterator[tuple[str, FieldInfo, str]]:
    """Name, field and panel of every setting, in the order of help and docs."""
    return ((name, AllSettings.model_fields[name], panel) for panel, names in PANELS.items() for name in names)


flag_name = errors.setting  # messages of the layers below also name a setting by its flag


def help_text(name: str) -> str:
    """Return the meaning of a setting and the form of its value, on one line."""
    note = FORMS[name].note if name in FORMS else ""
    return " ".join(f"{AllSettings.model_fields[name].description} {note}".split())


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def local_url(host: str, port: int) -> str:
    """Return an address that a client on this machine can use."""
    address = _address(host)
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
