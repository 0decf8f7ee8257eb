"""Settings of one engine, resolved and immutable. This module reads no file, no environment and no machine.

A setting is declared here or in another `SettingsGroup`: its type, default and range, and its help text as a docstring.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from .encoding import Pooling, Task
from .errors import ConfigError, setting

DEFAULT_MAX_PIXELS = 4 << 20
PROBE_PIXELS = 512 * 512  # the larger image with which the vision encoder is measured
DEFAULT_STALL_MS = 200.0
MAX_IMAGE_PIXELS = 178_000_000  # Pillow refuses every image larger than about this
Capability = Literal["images", "videos", "tools", "reasoning"]
CacheReasoning = Literal["auto", "keep", "drop"]
IdlePrefill = Literal["auto", "off"]
ToolGrammar = Literal["off", "names", "strict"]
UndeclaredCalls = Literal["text", "call"]
Wired = Literal["none", "weights"]
DOCUMENTED = ConfigDict(use_attribute_docstrings=True)  # the docstring below a field is its description

_RANGES = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than_equal": ("le", "must be at most"),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # by how the type of a fault begins


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsGroup:
    """Base of the dataclasses that declare settings. Creating one raises ConfigError for a value out of its range."""

    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: Any, create: ModelWrapValidatorHandler["SettingsGroup"]) -> "SettingsGroup":
        try:
            return create(values)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raise ConfigError(f"`{'.'.join(map(str, fault['loc'])) or cls.__name__}`{explain(fault)}.") from error


def explain(fault: Any) -> str:
    """Describe a wrong value, to follow the name of its setting. `fault`: one of `ValidationError.errors()`."""
    if fault["type"] == "missing":
        return " is missing"
    if fault["type"] in _RANGES:
        key, words = _RANGES[fault["type"]]
        return f" {words} {fault['ctx'][key]:.15g}"
    if kind := _KINDS.get(fault["type"].partition("_")[0]) or fault.get("ctx", {}).get("expected"):
        return f" must be {kind}"
    text = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
    return f": {text[:1].lower()}{text[1:]}"


def read_draft_tokens(value: object) -> object:
    """Read a number of drafts. Raises ValueError, which says what to write."""
    text = str(value).strip().lower()
    if text == "auto":
        return text
    if len(text) != 1 or text not in "01234567":
        raise ValueError("it must be auto or a whole number from 0 to 7")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class SamplingDefaults(SettingsGroup):
    """Values for fields that a request leaves out. For None, the checkpoint's generation_config decides, then the
    neutral values 1.0, 1.0 and 0.
    """

    temperature: float | None = None
    """Sampling temperature; 0 always takes the likeliest token. A request's own sampling fields win over these."""
    top_p: float | None = None
    """Keep the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float | None = None
    """Keep tokens that are at least this likely, relative to the likeliest one."""
    repetition_penalty: float | None = None
    """Above 1, tokens that have already occurred become less likely."""
    max_tokens: int | None = None
    """Longest reply, in tokens. Default: up to the context."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningStrings:
    """The text that begins reasoning, and the text that ends it once its budget is spent: a phrase and the tag."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class MediaConfig(SettingsGroup):
    """Limits of a request's images, videos and documents, and the sources that they may come from."""

    max_images: int = Field(default=100, ge=0)  # in one request
    max_videos: int = Field(default=4, ge=0)  # in one request
    max_documents: int = Field(default=100, ge=0)  # in one request
    max_image_bytes: int = Field(default=20_000_000, gt=0)
    """Size of the largest image file that is sent or fetched."""
    max_video_bytes: int = Field(default=100_000_000, gt=0)
    """Size of the largest video file that is sent or fetched."""
    max_image_pixels: int = Field(default=50_000_000, gt=0, le=MAX_IMAGE_PIXELS)
    """Pixels of the largest image or video frame; a larger one is refused before it is decoded."""
    max_video_pixels: int = Field(default=24 << 20, gt=0)
    """Pixels of all sampled frames of a video; larger frames are scaled down to fit."""
    max_decode_s: float = Field(default=30.0, gt=0)
    """Longest time to decode one video, or one image of more than 16.8 megapixels, in seconds."""
    max_request_pixels: int = 256_000_000
    """Pixels of all images and videos of one request, and of all that are decoded at the same time."""
    media_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time to fetch all media of one request, in seconds."""
    max_media_redirects: int = Field(default=3, ge=0)
    """Redirects that the fetch of one address may follow."""
    media_content_type: tuple[str, ...] = (
        "image/*", "video/*", "application/pdf", "text/plain", "text/markdown", "text/csv", "application/json",
        "application/octet-stream", "binary/octet-stream",
    )  # fmt: skip
    """Content type that fetched media may have; `*` matches anything."""
    media_root: str | None = None
    """Folder whose files a request may name as images, videos or documents. Default: no file may be named."""
    allow_private_media: bool = False
    """Fetch media also from addresses that are not on the public internet, such as this machine's."""
    media_cache_bytes: int = Field(default=256_000_000, ge=0)
    """Size of the decoded images and videos that are kept for the next turn; 0 keeps none."""
    document_pages: Literal["both", "images", "text"] = "both"
    """Content of a PDF page for a vision model: its image, its text, or `both`. Other models get the text."""
    max_document_bytes: int = Field(default=32_000_000, gt=0)
    """Size of the largest document that is sent or fetched."""
    max_document_pages: int = Field(default=100, gt=0)
    """Pages of the longest PDF."""
    max_document_chars: int = Field(default=1_000_000, gt=0)
    """Characters of the text of the longest document."""
    max_document_s: float = Field(default=30.0, gt=0)
    """Longest computing time to read one PDF, in seconds."""

    def __post_init__(self) -> None:
        if self.max_request_pixels < self.max_image_pixels:
            raise ConfigError(f"{setting('max_request_pixels')} must be at least {setting('max_image_pixels')}.")
        for kind in self.media_content_type:
            if "/" not in kind and "*" not in kind:
                raise ConfigError(f"{setting('media_content_type')} {kind} is not a content type such as image/png.")

    def max_bytes(self, kind: Literal["image", "video", "document"]) -> int:
        return {"image": self.max_image_bytes, "video": self.max_video_bytes, "document": self.max_document_bytes}[kind]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class ModelConfig(SettingsGroup):
    """The settings that describe one model. Each of several models has its own."""

    model: str  # local folder or Hugging Face id
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and reply together, in tokens. Default: the checkpoint's context, or as much as memory holds."""
    idle_unload_s: float = Field(default=0.0, ge=0)
    """Seconds without a request after which the weights leave memory, until the next request loads them again; 0:
    never."""
    num_draft_tokens: Annotated[int | Literal["auto"], BeforeValidator(read_draft_tokens)] = "auto"
    """Most tokens of a reply that are drafted and verified in one step, 0 to 7, or as many as pay on this machine
    (`auto`); 0 turns drafts off. The reply is the same, up to rounding where weights have 16 bits or fewer. Drafts come
    from the prompt, the reply, the request's `prediction`, its grammar, and the model's MTP head if it has one."""
    draft_model: str | None = None
    """Folder or Hugging Face id of an MTP head of the model, or of a checkpoint that holds it. Default: the one in the
    model's own checkpoint, if there is one."""
    enable_thinking: bool | None = None
    """Reasoning of requests that do not set it, if the model can reason. Default: yes."""
    default_thinking_token_budget: int | None = Field(default=None, ge=0)
    """Longest reasoning, in tokens, of a request that sets no budget. Default: no limit."""
    max_silent_tokens: int | None = Field(default=None, ge=1)
    """Tokens after which a reply that has reasoning only, and neither text nor a tool call, ends as if it had reached
    `max_tokens`. Default: no limit."""
    reasoning_config: ReasoningStrings | None = None
    """A text that begins reasoning in addition to the parser's own tags, and the text that ends it once its budget is
    spent. Default: the parser's tags."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning, or a parser of an installed package; `auto` detects the format in the chat
    template."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls, or a parser of an installed package; `auto` detects the format in the chat
    template."""
    tool_grammar: ToolGrammar = "names"
    """Restrict by a grammar in tool calls: nothing (`off`), their names to the declared tools (`names`), or complete
    calls to their schemas (`strict`). With `names`, calls of strict tools and calls that a request forces follow their
    schemas too; with `off`, no call can be forced."""
    undeclared_calls: UndeclaredCalls = "text"
    """Result of a call to an undeclared tool, if no grammar restricts its name: text, or a call like any other."""
    chat_template: str | None = None
    """Jinja chat template that replaces the checkpoint's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint, if a part of it needs that."""
    text_only: bool = False
    """Load a vision checkpoint without its vision encoder: it takes less memory, and no images."""
    max_pixels: int | None = Field(default=None, gt=0)
    """Pixels of an image that a vision model sees; larger images are scaled down. Default: 4194304, halved until the
    vision encoder reads an image within 3 s on this machine."""
    revision: str | None = None
    """Branch, tag or commit on Hugging Face."""
    task: Task | None = None
    """Use of the model: `chat`, `embedding` or `rerank`. Default: as the checkpoint's files say."""
    pooling: Pooling | None = None
    """Rule by which an embedding model makes one vector of a text's tokens. Default: as the checkpoint's files say."""
    normalize: bool | None = None
    """Scale each vector of an embedding model to length 1. Default: as the checkpoint's files say."""
    prompts: dict[str, str] | None = None
    """Texts that go before an input of an embedding model, each under the name by which requests choose it. Default:
    those in the checkpoint's files."""
    defaults: SamplingDefaults = Field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class EngineConfig(ModelConfig):
    """The settings of a model, and those of the process that serves it."""

    max_num_seqs: int = Field(default=32, gt=0)
    """Sequences that run at the same time; further ones wait."""
    max_queue: int = Field(default=256, ge=0)
    """Sequences that may wait; further ones are refused, with the time after which to try again."""
    max_queue_s: float | None = Field(default=None, gt=0)
    """Longest time in the admission queue, in seconds. Default: no limit."""
    max_model_wait_s: float = Field(default=300.0, gt=0)
    """Longest time in which a request waits for memory that other models hold, in seconds."""
    max_request_s: float | None = Field(default=None, gt=0)
    """Longest time of a request, waiting included, in seconds. Default: no limit."""
    max_prepare_s: float = Field(default=120.0, gt=0)
    """Longest time to prepare a request's prompt, in seconds: fetching, decoding, rendering, tokenising, waiting."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Seconds after which a step of the engine counts as hung, and `/health` reports it."""
    max_stall_ms: float | None = Field(default=None, gt=0)
    """Longest pause of running replies while a prompt is computed, in milliseconds. Default: 200, or twice the
    time of a step without a prompt if that is longer, at most 400."""
    max_prefill_chunk: int = Field(default=2048, gt=0)
    """Most prompt tokens computed in one step while no reply is running; chunks have lengths that are powers of two."""
    memory_budget_bytes: int | None = None  # None: computed from the machine's memory
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Macs that run the model together, this one included, each with a part of every layer; on each of the others runs
    `vllm-mlx worker`. It is experimental: docs/scaling.md lists its requirements and limits."""
    wired: Wired = "none"
    """Memory that Metal never pages out: nothing (`none`), or the weights, which then answer faster after a pause. On
    some versions of macOS wiring may restart the Mac; docs/mac-checklist.md has a test."""
    keep_awake: bool = True
    """On macOS, keep the machine from falling asleep while requests run."""
    prefix_cache: bool = True
    """Keep the state of prompts and replies, so that a common beginning is computed only once."""
    repeatable: bool = False
    """Give the same request the same reply, bit for bit, during any other requests, for tests of prompts and models. It
    turns the prefix cache and batches off: each prompt is computed from its start, each reply is computed alone, and
    `max_stall_ms` does not hold. A request repeats only with the same seed, or with temperature 0, on the same machine
    and versions."""
    cache_memory_bytes: int | None = None  # None: all memory that running rows leave free
    cache_disk_bytes: int | None = Field(default=None, ge=0)  # None: a tenth of the disk's free space; 0: off
    cache_dir: str | None = None
    """Folder of the prefix cache on disk, which must hold nothing else. Default: `~/Library/Caches/vllm-mlx` on
    macOS, `vllm-mlx` in `$XDG_CACHE_HOME` or `~/.cache` elsewhere."""
    cache_disk_daily_bytes: int | None = Field(default=None, ge=0)  # written in one day, by default a fifth of the disk
    snapshot_every: int = Field(default=8192, ge=0)
    """Prompt tokens between two snapshots during a long prefill, so that an aborted request loses little; 0: none."""
    cache_reasoning: CacheReasoning = "auto"
    """Reasoning that stays in the prefix cache: the part in the next turn (`auto`), all (`keep`) or none (`drop`)."""
    idle_prefill: IdlePrefill = "auto"
    """Between two questions, compute the beginning of the next prompt if the chat template will write the last turn
    differently, such as without its reasoning (`auto`), or never (`off`). It never runs during a request, on battery
    power or under memory pressure."""
    media: MediaConfig = Field(default_factory=MediaConfig)

    def with_model(self, model: ModelConfig) -> "EngineConfig":
        """Return the settings of another model of this process."""
        return dataclasses.replace(self, **{name: getattr(model, name) for name in ModelConfig.__pydantic_fields__})

    @property
    def stall_ms(self) -> float:
        """Milliseconds beyond which the pause of a reply counts as a stall."""
        return DEFAULT_STALL_MS if self.max_stall_ms is None else self.max_stall_ms

    @property
    def wants_drafts(self) -> bool:
        return not self.repeatable and self.num_draft_tokens != 0

    @property
    def looks_ahead(self) -> bool:
        """Return whether beginnings of next prompts are computed while no request runs."""
        return self.idle_prefill == "auto" and self.prefix_cache and self.tensor_parallel_size == 1

    @property
    def no_unload(self) -> str | None:
        """Return the reason to keep the weights in memory; None if they may leave."""
        if self.tensor_parallel_size > 1:
            return "The model is in the memory of several ranks, which load it when they start."
        if self.wired == "none":
            return None
        return (
            f"{setting('wired')} {self.wired} keeps the weights in memory, because on some versions of macOS wired "
            "memory that changes may restart the Mac."
        )

    def __post_init__(self) -> None:
        self._check_ranks()
        if self.idle_unload_s and self.no_unload is not None:
            raise ConfigError(f"{self.no_unload} Leave it out, or {setting('idle_unload_s')}.")
        if self.draft_model is not None and not self.wants_drafts:
            cause = setting("repeatable") if self.repeatable else f"{setting('num_draft_tokens')} 0"
            raise ConfigError(
                f"{cause} turns drafts off, and {setting('draft_model')} needs them. Leave one of the two out."
            )
        if self.repeatable:  # state of other requests, or of decoded tokens, is rounded in another way
            object.__setattr__(self, "prefix_cache", False)
        if self.cache_disk_bytes and not self.prefix_cache:
            cause = setting("repeatable") if self.repeatable else f"{setting('prefix_cache')} being off"
            raise ConfigError(
                f"{setting('cache_disk')} keeps the prefix cache on disk, and with {cause} there is no prefix cache. "
                "Leave one of the two out."
            )

    def _check_ranks(self) -> None:
        """Raise ConfigError for a setting that a model on several machines does not support."""
        drafts = self.draft_model is not None or self.num_draft_tokens not in ("auto", 0)
        asked = {
            "idle_unload_s": self.idle_unload_s > 0,
            "cache_disk": bool(self.cache_disk_bytes),
            "draft_model" if self.draft_model is not None else "num_draft_tokens": drafts,
        }
        for name in [name for name, is_asked in asked.items() if is_asked and self.tensor_parallel_size > 1]:
            raise ConfigError(
                f"{setting(name)} does not work with {setting('tensor_parallel_size')}. Leave one of the two out."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded checkpoint that other packages may use."""

    model: str
    architecture: str
    max_model_len: int
    weights_bytes: int
    vocab_size: int
    takes_images: bool = False
    task: Task = "chat"
    created: int  # unix seconds of the load
    temperature: float = 1.0  # of requests that give none
    top_p: float = 1.0
