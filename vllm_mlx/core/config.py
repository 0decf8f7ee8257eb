"""Settings of one engine, resolved and immutable. Reads no file, no environment, no machine."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from .errors import ConfigError

CacheReasoning = Literal["auto", "keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. None: the checkpoint's generation_config, then 1.0 / 1.0 / 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str  # local folder or Hugging Face id
    max_num_seqs: int = 32  # sequences that prefill or decode at once; others wait
    max_model_len: int | None = None  # None: the checkpoint's, or what memory holds
    max_stall_ms: float = 200.0  # longest gap that a prefill may put between two tokens of a running reply
    max_prefill_chunk: int = 2048  # tokens of one chunk while nothing decodes
    memory_budget_bytes: int | None = None  # None: from the machine
    prefix_cache: bool = True
    cache_memory_bytes: int | None = None  # None: all that live rows leave free
    snapshot_every: int = 8192  # tokens between copies of state during a long prefill; 0: none
    cache_reasoning: CacheReasoning = "auto"  # of a reply that reasoned: what a next turn contains, all, nothing
    enable_thinking: bool | None = None  # None: on
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    chat_template: str | None = None  # template text that replaces the checkpoint's
    trust_remote_code: bool = False
    revision: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_stall_ms", "max_prefill_chunk"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0.")
        if self.snapshot_every < 0:
            raise ConfigError("--snapshot-every must be at least 0.")
        if self.cache_reasoning not in get_args(CacheReasoning):
            raise ConfigError(f"--cache-reasoning must be one of {', '.join(get_args(CacheReasoning))}.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("--max-model-len must be at least 2: one prompt token and one of reply.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded checkpoint that other layers may know."""

    model: str
    architecture: str
    max_model_len: int
    weights_bytes: int
    vocab_size: int
    created: int  # unix seconds of the load
