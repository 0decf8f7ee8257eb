"""Settings of one engine, resolved and immutable. This module reads no file, no environment and no machine.

A setting is declared here, or in another `SettingsGroup`, with its default and its range.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from .errors import ConfigError, setting

MAX_IMAGE_PIXELS = 178_000_000  # Pillow refuses every image larger than about this
CacheReasoning = Literal["auto", "keep", "drop"]
ToolGrammar = Literal["auto", "strict", "off"]
Wired = Literal["none", "weights"]

_RANGES = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than_equal": ("le", "must be at most"),
}


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
    """What is wrong with a value, to follow the name of its setting. `fault` is one of `ValidationError.errors()`."""
    if fault["type"] in _RANGES:
        key, words = _RANGES[fault["type"]]
        return f" {words} {fault['ctx'][key]:.15g}"
    text = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
    return f": {text[:1].lower()}{text[1:]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for fields that a request leaves out. None: the checkpoint's generation_config, then 1.0 / 1.0 / 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningStrings:
    """The text that begins reasoning, and the text that ends it once its budget is spent: a phrase and the tag."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig(SettingsGroup):
    """Limits of a request's images and videos, and the sources that they may come from."""

    max_images: int = Field(default=100, ge=0)  # in one request
    max_videos: int = Field(default=4, ge=0)  # in one request
    max_image_bytes: int = Field(default=20_000_000, gt=0)  # size of one encoded file
    max_video_bytes: int = Field(default=100_000_000, gt=0)  # size of one encoded file
    max_image_pixels: int = Field(
        default=50_000_000, gt=0, le=MAX_IMAGE_PIXELS
    )  # pixels of one image, or of one frame of a video
    max_video_pixels: int = Field(
        default=24 << 20, gt=0
    )  # pixels of all sampled frames of a video, which are scaled down to it
    max_decode_s: float = Field(default=30.0, gt=0)  # seconds for one video
    max_request_pixels: int = 256_000_000  # pixels of all images of one request, and of all images decoded at once
    media_timeout_s: float = Field(default=10.0, gt=0)  # seconds for all media that one request fetches
    max_media_redirects: int = Field(default=3, ge=0)
    media_content_type: tuple[str, ...] = ("image/*", "video/*", "application/octet-stream", "binary/octet-stream")
    media_root: str | None = None  # folder whose files a request may name; None: no file
    allow_private_media: bool = False  # whether to fetch from addresses that are not public
    media_cache_bytes: int = Field(default=256_000_000, ge=0)  # decoded images kept for the next turn

    def __post_init__(self) -> None:
        if self.max_request_pixels < self.max_image_pixels:
            raise ConfigError(f"{setting('max_request_pixels')} must be at least {setting('max_image_pixels')}.")

    def max_bytes(self, kind: Literal["image", "video"]) -> int:
        return self.max_image_bytes if kind == "image" else self.max_video_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SettingsGroup):
    """All settings of one engine."""

    model: str  # local folder or Hugging Face id
    max_num_seqs: int = Field(default=32, gt=0)  # sequences that run at once; others wait
    max_queue: int = Field(default=256, ge=0)  # sequences that may wait
    max_queue_s: float | None = Field(default=None, gt=0)  # longest time in the admission queue; None: no limit
    max_request_s: float | None = Field(
        default=None, gt=0
    )  # longest time of a request, waiting included; None: no limit
    max_prepare_s: float = Field(
        default=120.0, gt=0
    )  # longest time to prepare a request's prompt, media and waiting included
    watchdog_s: float = Field(default=120.0, gt=0)  # a step that takes longer is reported as hanging
    max_model_len: int | None = Field(default=None, ge=2)  # None: the checkpoint's context, or as much as memory holds
    max_stall_ms: float = Field(
        default=200.0, gt=0
    )  # longest gap that a prefill may put between two tokens of a running reply
    max_prefill_chunk: int = Field(default=2048, gt=0)  # tokens of one chunk while nothing decodes
    memory_budget_bytes: int | None = None  # None: computed from the machine's memory
    wired: Wired = "none"  # what Metal keeps wired: nothing, or the weights, set once after load
    keep_awake: bool = True  # on macOS, whether running requests keep the machine from falling asleep
    prefix_cache: bool = True
    repeatable: bool = False  # fixed chunks of prompts and no batches; it turns the prefix cache off
    cache_memory_bytes: int | None = None  # None: all memory that running rows leave free
    snapshot_every: int = Field(default=8192, ge=0)  # tokens between copies of state during a long prefill; 0: none
    cache_reasoning: CacheReasoning = "auto"  # reasoning kept: what the next turn contains, all, none
    enable_thinking: bool | None = None  # None: on
    default_thinking_token_budget: int | None = Field(
        default=None, ge=0
    )  # default of requests that set none; None: no limit
    reasoning_config: ReasoningStrings | None = None  # None: the reasoning parser's tags
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    tool_grammar: ToolGrammar = "auto"  # calls that must follow their schema: strict tools, all, none
    chat_template: str | None = None  # text of a template that replaces the checkpoint's
    trust_remote_code: bool = False
    text_only: bool = False  # load a vision checkpoint without its vision encoder
    max_pixels: int = Field(default=4 << 20, gt=0)  # pixels of one image; larger images are scaled down
    revision: str | None = None
    defaults: SamplingDefaults = Field(default_factory=SamplingDefaults)
    media: MediaConfig = Field(default_factory=MediaConfig)

    def __post_init__(self) -> None:
        if self.repeatable:  # state of other requests, or of decoded tokens, is rounded in another way
            object.__setattr__(self, "prefix_cache", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded checkpoint that other packages may use."""

    model: str
    architecture: str
    max_model_len: int
    weights_bytes: int
    vocab_size: int
    takes_images: bool = False
    created: int  # unix seconds of the load
