"""Settings of one engine, resolved and immutable. This module reads no file, no environment and no machine."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from .errors import ConfigError, setting

MAX_IMAGE_PIXELS = 178_000_000  # Pillow refuses every image larger than about this
CacheReasoning = Literal["auto", "keep", "drop"]
ToolGrammar = Literal["auto", "strict", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for fields that a request leaves out. None: the checkpoint's generation_config, then 1.0 / 1.0 / 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningStrings:
    """The text that begins reasoning, and the text that ends it once its budget is spent: a phrase and the tag."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits of a request's images and videos, and the sources that they may come from."""

    max_images: int = 100  # in one request
    max_videos: int = 4  # in one request
    max_image_bytes: int = 20_000_000  # of one encoded file
    max_video_bytes: int = 100_000_000  # of one encoded file
    max_image_pixels: int = 50_000_000  # of one image, or of one frame of a video
    max_video_pixels: int = 24 << 20  # of all sampled frames of a video, which are scaled down to it
    max_decode_s: float = 30.0  # for one video
    max_request_pixels: int = 256_000_000  # of all images of one request, and of all images decoded at once
    media_timeout_s: float = 10.0  # for all media that one request fetches
    max_media_redirects: int = 3
    media_content_type: tuple[str, ...] = ("image/*", "video/*", "application/octet-stream", "binary/octet-stream")
    media_root: str | None = None  # folder whose files a request may name; None: no file
    allow_private_media: bool = False  # whether to fetch from addresses that are not public
    media_cache_bytes: int = 256_000_000  # decoded images kept for the next turn

    def __post_init__(self) -> None:
        for name in (
            *("max_image_bytes", "max_video_bytes", "max_image_pixels", "max_video_pixels"),
            *("max_decode_s", "media_timeout_s"),
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{setting(name)} must be greater than 0.")
        for name in ("max_images", "max_videos", "max_media_redirects", "media_cache_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{setting(name)} must be at least 0.")
        if self.max_image_pixels > MAX_IMAGE_PIXELS:
            raise ConfigError(
                f"{setting('max_image_pixels')} must be at most {MAX_IMAGE_PIXELS}: no larger image is decoded."
            )
        if self.max_request_pixels < self.max_image_pixels:
            raise ConfigError(f"{setting('max_request_pixels')} must be at least {setting('max_image_pixels')}.")

    def max_bytes(self, kind: Literal["image", "video"]) -> int:
        return self.max_image_bytes if kind == "image" else self.max_video_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. Raises ConfigError for a value out of range."""

    model: str  # local folder or Hugging Face id
    max_num_seqs: int = 32  # sequences that run at once; others wait
    max_queue: int = 256  # sequences that may wait
    max_queue_s: float | None = None  # longest time in the admission queue; None: no limit
    max_request_s: float | None = None  # longest time of a request, waiting included; None: no limit
    max_prepare_s: float = 120.0  # longest time to prepare a request's prompt, media and waiting included
    watchdog_s: float = 120.0  # a step that takes longer is reported as hanging
    max_model_len: int | None = None  # None: the checkpoint's context, or as much as memory holds
    max_stall_ms: float = 200.0  # longest gap that a prefill may put between two tokens of a running reply
    max_prefill_chunk: int = 2048  # tokens of one chunk while nothing decodes
    memory_budget_bytes: int | None = None  # None: computed from the machine's memory
    prefix_cache: bool = True
    cache_memory_bytes: int | None = None  # None: all memory that running rows leave free
    snapshot_every: int = 8192  # tokens between copies of state during a long prefill; 0: none
    cache_reasoning: CacheReasoning = "auto"  # reasoning kept: what the next turn contains, all, none
    enable_thinking: bool | None = None  # None: on
    default_thinking_token_budget: int | None = None  # for requests that set none; None: no limit
    reasoning_config: ReasoningStrings | None = None  # None: the reasoning parser's tags
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    tool_grammar: ToolGrammar = "auto"  # calls that must follow their schema: strict tools, all, none
    chat_template: str | None = None  # text of a template that replaces the checkpoint's
    trust_remote_code: bool = False
    text_only: bool = False  # load a vision checkpoint without its vision encoder
    max_pixels: int = 4 << 20  # of one image; larger images are scaled down
    revision: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    media: MediaConfig = field(default_factory=MediaConfig)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_stall_ms", "max_prepare_s", "watchdog_s", "max_prefill_chunk", "max_pixels"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{setting(name)} must be greater than 0.")
        if self.max_queue < 0:
            raise ConfigError(f"{setting('max_queue')} must be at least 0.")
        for name in ("max_queue_s", "max_request_s"):
            if (limit_s := getattr(self, name)) is not None and limit_s <= 0:
                raise ConfigError(f"{setting(name)} must be greater than 0.")
        if self.snapshot_every < 0:
            raise ConfigError(f"{setting('snapshot_every')} must be at least 0.")
        if self.cache_reasoning not in get_args(CacheReasoning):
            raise ConfigError(f"{setting('cache_reasoning')} must be one of {', '.join(get_args(CacheReasoning))}.")
        if self.default_thinking_token_budget is not None and self.default_thinking_token_budget < 0:
            raise ConfigError(f"{setting('default_thinking_token_budget')} must be at least 0.")
        if self.tool_grammar not in get_args(ToolGrammar):
            raise ConfigError(f"{setting('tool_grammar')} must be one of {', '.join(get_args(ToolGrammar))}.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"{setting('max_model_len')} must be at least 2: one prompt token and one of reply.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded checkpoint that other packages may use."""

    model: str
    architecture: str
    max_model_len: int
    weights_bytes: int
    vocab_size: int
    takes_images: bool = False
    created: int  # unix seconds of the load
