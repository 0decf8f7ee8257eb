"""Every setting of the server, once. A field is a flag, an environment variable, a TOML key and a line of the docs.

It knows the settings of every layer, and nothing else of the layers.
"""

import dataclasses
import ipaddress
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..core import errors
from ..core.config import (
    CacheReasoning,
    EngineConfig,
    MediaConfig,
    ReasoningStrings,
    SamplingDefaults,
    SettingsGroup,
    ToolGrammar,
    Wired,
)
from ..core.errors import ConfigError, InvalidParameter
from ..core.memory import physical_memory
from ..core.request import RequestLimits, SamplingParams
from ..core.tenants import APIKey
from ..server.config import ConnectionLimits, ServerConfig
from .keys import all_keys
from .memory import MemoryAmount, parse_bytes, parse_memory
from .per_prompt import DEFAULT, max_per_prompt, parse_limit

ENV_PREFIX = "VLLM_MLX_"
DEMO_MODEL = "demo"
POSITIONAL = frozenset({"model"})  # given without a flag


class Panel(StrEnum):
    """Headings under which the help and the docs list the settings, in this order."""

    MODEL = "Model"
    SERVER = "Server"
    LIMITS = "Limits"
    ENGINE = "Engine and memory"
    IMAGES = "Images and videos"
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


def read_reasoning_strings(value: object) -> object:
    """JSON of two texts, under vLLM's names or the older ones."""
    if not isinstance(value, str):
        return value
    try:
        given = json.loads(value)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    known = {"reasoning_start_str", "reasoning_end_str", "think_start_str", "think_end_str"}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError("it takes an object of `reasoning_start_str` and `reasoning_end_str`")
    start, end = (given.get(f"reasoning_{part}_str") or given.get(f"think_{part}_str") for part in ("start", "end"))
    if not (isinstance(start, str) and start.strip() and isinstance(end, str) and end.strip()):
        raise ValueError("it needs the texts `reasoning_start_str` and `reasoning_end_str`")
    return ReasoningStrings(start, end)


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
SeveralSecrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_commas)]
Memory = Annotated[MemoryAmount | None, BeforeValidator(parse_memory)]
ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
PerPrompt = Annotated[str, BeforeValidator(parse_limit)]
Strings = Annotated[ReasoningStrings | None, NoDecode, BeforeValidator(read_reasoning_strings)]
Template = Annotated[str | None, BeforeValidator(read_template)]


def setting(panel: Panel, default: Any, **limits: Any) -> Any:
    return Field(default=default, json_schema_extra={"panel": panel}, **limits)


def declared(group: type[SettingsGroup], name: str, panel: Panel) -> Any:
    """A setting that a layer below declares: it has the default and the range of that declaration."""
    field = group.__pydantic_fields__[name]
    ranges = {limit: value for rule in field.metadata for limit, value in dataclasses.asdict(rule).items()}
    return setting(panel, field.default, **ranges)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    model: str = setting(Panel.MODEL, DEMO_MODEL)
    """Folder or Hugging Face id of a checkpoint. `demo` is the small bundled one."""
    served_model_name: Several = setting(Panel.MODEL, ())
    """Name clients ask for; the first is the one in replies. Default: the model's own name."""
    revision: str | None = declared(EngineConfig, "revision", Panel.MODEL)
    """Branch, tag or commit on Hugging Face."""
    trust_remote_code: bool = declared(EngineConfig, "trust_remote_code", Panel.MODEL)
    """Run Python code that comes with the checkpoint, where a part needs it."""
    text_only: bool = declared(EngineConfig, "text_only", Panel.MODEL)
    """Load a vision checkpoint without its vision tower: less memory, no images."""
    chat_template: Template = declared(EngineConfig, "chat_template", Panel.MODEL)
    """Jinja chat template, as text or as a file, in place of the checkpoint's."""
    enable_thinking: bool | None = declared(EngineConfig, "enable_thinking", Panel.MODEL)
    """Whether a model that can reason does so when the request does not say. Default: it does."""
    reasoning_parser: str = declared(EngineConfig, "reasoning_parser", Panel.MODEL)
    """Format of the model's reasoning. `auto` reads it off the chat template."""
    tool_grammar: ToolGrammar = declared(EngineConfig, "tool_grammar", Panel.MODEL)
    """Which tool calls are held to their schema: those of strict tools (`auto`), all (`strict`), or none (`off`). Calls
    that a request forces always are, unless `off`, which refuses to force any."""
    reasoning_config: Strings = declared(EngineConfig, "reasoning_config", Panel.MODEL)
    """JSON, as `{"reasoning_start_str": "<think>", "reasoning_end_str": "That will do.</think>"}`: what begins a
    thought, and what is written where its budget is spent. Default: the reasoning parser's tags."""
    tool_call_parser: str = declared(EngineConfig, "tool_call_parser", Panel.MODEL)
    """Format of the model's tool calls. `auto` reads it off the chat template."""
    host: str = setting(Panel.SERVER, "127.0.0.1")
    """Address to listen on. `0.0.0.0` opens the server to the network."""
    port: int = setting(Panel.SERVER, 8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free one."""
    api_key: SeveralSecrets = setting(Panel.SERVER, ())
    """Key that clients must send, as `Authorization: Bearer` or `x-api-key`. Default: none asked."""
    api_key_file: Path | None = setting(Panel.SERVER, None)
    """File of such keys, one on each line, as `NAME:KEY` or `NAME:KEY PRIORITY`. Their holders share no cache."""
    admin_key_file: Path | None = setting(Panel.SERVER, None)
    """File of keys, written alike, that may also cancel and clear what belongs to others."""
    metrics_open: bool = declared(ServerConfig, "metrics_open", Panel.SERVER)
    """Let `/metrics` be read without a key."""
    insecure: bool = setting(Panel.SERVER, False)
    """Listen beyond this machine without a key: anyone who reaches the port may use the server."""
    allowed_host: Several = setting(Panel.SERVER, ())
    """Name under which clients may address the server, beside its addresses, localhost and this machine's own; `*` for
    any. Other names are refused, since a web page could point its own here."""
    cors_origin: Several = setting(Panel.SERVER, ())
    """Origin whose web pages may call the server; `*` for any. Default: none."""
    separate_reasoning: bool = declared(ServerConfig, "separate_reasoning", Panel.SERVER)
    """Send reasoning apart from the content. Without it, chat completions that do not say carry it inline, tagged."""
    messages_thinking: Literal["asked", "always"] = declared(ServerConfig, "messages_thinking", Panel.SERVER)
    """Which replies of `/v1/messages` have thinking blocks: those to requests that ask for thinking, or all."""
    keep_alive_s: float = declared(ServerConfig, "keep_alive_s", Panel.SERVER)
    """Seconds of silence after which a stream sends an event that keeps clients waiting."""
    max_body: Memory = setting(Panel.LIMITS, None)
    """Largest request body, images included: bytes (`64MiB`). Default: 256 MiB."""
    drain_s: float = setting(Panel.SERVER, 5.0, ge=0)
    """Seconds that running replies get to finish after Ctrl-C, SIGTERM or SIGHUP."""
    log_level: Literal["debug", "info", "warning", "error"] = setting(Panel.SERVER, "info")
    """How much is logged. Prompts and replies never are."""
    max_queue: int = declared(EngineConfig, "max_queue", Panel.LIMITS)
    """Sequences that may wait beyond those that run; more are refused with the time after which to try again."""
    max_queue_s: float | None = declared(EngineConfig, "max_queue_s", Panel.LIMITS)
    """Longest wait in line, in seconds. Default: as long as it takes."""
    max_request_s: float | None = declared(EngineConfig, "max_request_s", Panel.LIMITS)
    """Longest time for a request and its reply, in seconds. Default: any."""
    max_prepare_s: float = declared(EngineConfig, "max_prepare_s", Panel.LIMITS)
    """Longest time in seconds to make a prompt of a request: fetching, decoding, rendering, tokenising, waiting."""
    watchdog_s: float = declared(EngineConfig, "watchdog_s", Panel.LIMITS)
    """Seconds after which a step of the engine counts as hung, and `/health` says so."""
    max_requests_per_minute: int | None = declared(ServerConfig, "max_requests_per_minute", Panel.LIMITS)
    """Requests a minute of one key, or of one address where no key is asked for. Default: any."""
    max_messages: int = declared(RequestLimits, "max_messages", Panel.LIMITS)
    """Messages of one request."""
    max_tools: int = declared(RequestLimits, "max_tools", Panel.LIMITS)
    """Tools of one request."""
    max_schema_bytes: int = declared(RequestLimits, "max_schema_bytes", Panel.LIMITS)
    """Length of one JSON schema, of a tool or a reply."""
    max_choices: int = declared(RequestLimits, "max_choices", Panel.LIMITS)
    """Replies to one request: `n` for each of its prompts."""
    max_connections: int = declared(ConnectionLimits, "max_connections", Panel.LIMITS)
    """Connections held at once, idle ones too."""
    slow_client_s: float = declared(ConnectionLimits, "head_s", Panel.LIMITS)
    """Seconds for a request's headers to come, for its body, which gets longer if it is long, and for a client to go on
    reading a reply."""
    max_model_len: int | None = declared(EngineConfig, "max_model_len", Panel.ENGINE)
    """Longest prompt plus reply, in tokens. Default: the checkpoint's, or what memory holds."""
    max_num_seqs: int = declared(EngineConfig, "max_num_seqs", Panel.ENGINE)
    """Sequences that run at once; further ones wait in line."""
    memory_budget: Memory = setting(Panel.ENGINE, None)
    """Memory for weights and all state: bytes (`24GB`) or a share of the machine's (`0.7`). Default: by machine."""
    wired: Wired = declared(EngineConfig, "wired", Panel.ENGINE)
    """Memory that Metal never pages out: nothing, or the weights, which answer faster after a pause. On some versions
    of macOS wiring may restart the Mac: docs/mac-checklist.md has a test."""
    keep_awake: bool = declared(EngineConfig, "keep_awake", Panel.ENGINE)
    """On macOS, keep the machine from falling asleep while requests run."""
    max_stall_ms: float = declared(EngineConfig, "max_stall_ms", Panel.ENGINE)
    """Longest pause of running replies, in milliseconds, while a prompt is read."""
    max_prefill_chunk: int = declared(EngineConfig, "max_prefill_chunk", Panel.ENGINE)
    """Prompt tokens computed in one go while no reply is running."""
    max_pixels: int = declared(EngineConfig, "max_pixels", Panel.ENGINE)
    """Pixels of an image that a vision model sees; larger ones are scaled down."""
    prefix_cache: bool = declared(EngineConfig, "prefix_cache", Panel.ENGINE)
    """Keep the state of prompts and replies: what begins alike is computed once."""
    repeatable: bool = declared(EngineConfig, "repeatable", Panel.ENGINE)
    """Give the same request the same reply, bit for bit, whatever else runs: for tests of prompts and models. It costs
    the prefix cache and batches: each prompt is read from its start, each reply is computed alone, and `--max-stall-ms`
    does not hold. A request repeats only with the same seed, or temperature 0, on the same machine and versions."""
    cache_memory: Memory = setting(Panel.ENGINE, None)
    """Memory the prefix cache may take, within the budget: bytes or a share. Default: what running replies leave."""
    snapshot_every: int = declared(EngineConfig, "snapshot_every", Panel.ENGINE)
    """Prompt tokens between copies of state while a long prompt is read, so that an abort loses little; 0: none."""
    cache_reasoning: CacheReasoning = declared(EngineConfig, "cache_reasoning", Panel.ENGINE)
    """What stays cached of a reply that reasoned: what the next turn will contain (`auto`), all, or nothing."""
    cache_thinking_tokens: bool = setting(Panel.ENGINE, False)
    """Another name for `--cache-reasoning keep`."""
    limit_mm_per_prompt: PerPrompt = setting(Panel.IMAGES, DEFAULT)
    """Images and videos that one request may hold."""
    max_image_bytes: ByteCount = declared(MediaConfig, "max_image_bytes", Panel.IMAGES)
    """Largest image file, as it is sent or fetched, in bytes (`20MB`)."""
    max_video_bytes: ByteCount = declared(MediaConfig, "max_video_bytes", Panel.IMAGES)
    """Largest video file, as it is sent or fetched, in bytes (`100MB`)."""
    max_image_pixels: int = declared(MediaConfig, "max_image_pixels", Panel.IMAGES)
    """Pixels of the largest image or frame; a larger one is refused before it is decoded."""
    max_video_pixels: int = declared(MediaConfig, "max_video_pixels", Panel.IMAGES)
    """Pixels of all frames that are shown of a video; larger frames are scaled down to that."""
    max_decode_s: float = declared(MediaConfig, "max_decode_s", Panel.IMAGES)
    """Seconds that the decoding of one video may take."""
    max_request_pixels: int = declared(MediaConfig, "max_request_pixels", Panel.IMAGES)
    """Pixels of all images and videos of one request, and of all that are decoded at once."""
    media_timeout_s: float = declared(MediaConfig, "media_timeout_s", Panel.IMAGES)
    """Seconds for all that one request has to be fetched."""
    max_media_redirects: int = declared(MediaConfig, "max_media_redirects", Panel.IMAGES)
    """Redirects that an address may go through."""
    media_content_type: Several = declared(MediaConfig, "media_content_type", Panel.IMAGES)
    """Content type under which media are served on the web; `*` stands for anything."""
    allow_private_media: bool = declared(MediaConfig, "allow_private_media", Panel.IMAGES)
    """Fetch media from addresses that are not on the public internet, this machine's too."""
    media_root: str | None = declared(MediaConfig, "media_root", Panel.IMAGES)
    """Folder whose files requests may name as images or videos. Default: no file may be named."""
    media_cache_bytes: ByteCount = declared(MediaConfig, "media_cache_bytes", Panel.IMAGES)
    """Bytes of decoded pictures and videos kept for the turns to come (`256MB`); 0: none."""
    default_thinking_token_budget: int | None = declared(EngineConfig, "default_thinking_token_budget", Panel.SAMPLING)
    """Tokens that a thought may take where the request does not say. Default: no bound."""
    temperature: float | None = setting(Panel.SAMPLING, None)
    """0 always takes the likeliest token. These defaults apply where a request says nothing."""
    top_p: float | None = setting(Panel.SAMPLING, None)
    """Keep the likeliest tokens that make up this probability."""
    top_k: int | None = setting(Panel.SAMPLING, None)
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float | None = setting(Panel.SAMPLING, None)
    """Keep tokens at least this likely, relative to the likeliest one."""
    repetition_penalty: float | None = setting(Panel.SAMPLING, None)
    """Above 1, tokens that already occurred become less likely."""
    max_tokens: int | None = setting(Panel.SAMPLING, None)
    """Longest reply, in tokens. Default: up to the context."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """A local folder is served under its own name, not its path."""
        if self.served_model_name:
            return self.served_model_name
        folder = Path(self.model).expanduser()
        return (folder.resolve().name,) if folder.is_dir() else (self.model,)

    @property
    def keys(self) -> tuple[APIKey, ...]:
        """Raises ConfigError."""
        return all_keys((key.get_secret_value() for key in self.api_key), self.api_key_file, self.admin_key_file)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """What ordinary clients send. Raises ConfigError."""
        return tuple(key.secret for key in self.keys if not key.is_admin)

    @property
    def host_names(self) -> tuple[str, ...]:
        return self.allowed_host if is_local(self.host) else (self.host, *self.allowed_host)

    @property
    def max_body_bytes(self) -> int | None:
        return _bytes(self.max_body)

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError for a value the engine refuses."""
        values = self._values_of(EngineConfig)
        if self.cache_thinking_tokens:
            if self.cache_reasoning == "drop":
                raise ConfigError("--cache-thinking-tokens and --cache-reasoning drop contradict each other.")
            values["cache_reasoning"] = "keep"
        return EngineConfig(
            **values,
            memory_budget_bytes=_bytes(self.memory_budget),
            cache_memory_bytes=_bytes(self.cache_memory),
            defaults=self.sampling_defaults(),
            media=self.media_config(),
        )

    def request_limits(self) -> RequestLimits:
        return RequestLimits(**self._values_of(RequestLimits))

    def media_config(self) -> MediaConfig:
        most = max_per_prompt(self.limit_mm_per_prompt)
        return MediaConfig(max_images=most["image"], max_videos=most["video"], **self._values_of(MediaConfig))

    def sampling_defaults(self) -> SamplingDefaults:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingDefaults)}
        try:
            SamplingParams(**values)  # a default has the limits of the request's field
        except InvalidParameter as error:
            raise ConfigError(f"{flag_name(error.param or '')}: {error.message}") from error
        return SamplingDefaults(**values)

    def _values_of(self, group: type[SettingsGroup]) -> dict[str, Any]:
        """The settings that `group` has under the same name."""
        return {name: getattr(self, name) for name in group.__pydantic_fields__.keys() & type(self).model_fields.keys()}


def _bytes(amount: MemoryAmount | None) -> int | None:
    return None if amount is None else amount.to_bytes(physical_memory())


def settings_fields() -> Iterator[tuple[str, FieldInfo, Panel]]:
    """Name, field and panel of every setting, in the order of help and docs."""
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict), "a setting is declared through setting()"
        yield name, field, Panel(str(field.json_schema_extra["panel"]))


flag_name = errors.setting  # messages of the layers below name a setting by its flag too


def help_text(field: FieldInfo) -> str:
    """What the docstring below a setting says, on one line."""
    return " ".join((field.description or "").split())


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def local_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    address = _address(host)
    if address is None:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        return f"http://127.0.0.1:{port}" if address.version == 4 else f"http://[::1]:{port}"
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
