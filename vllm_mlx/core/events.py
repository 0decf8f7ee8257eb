"""The one stream of events that every protocol encodes.

Order: Started, any number of PromptProgress, any number of Counted and content events, then Finished or Failed once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from .errors import VLLMMLXError
from .receipt import CacheReceipt


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens whose state came from the prefix cache
    completion_tokens: int = 0  # sampled tokens, the stop token included
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | None = None  # tokens of the request's prediction that the reply took as drafts
    rejected_prediction_tokens: int | None = None  # the rejected ones; both are None without a prediction
    num_searches: int = 0  # web searches that the server made
    clamped_max_tokens: int | None = None  # set when the context window cut the requested max_tokens
    receipt: CacheReceipt | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token. Log probabilities are natural logarithms of the model's own distribution, before sampling."""

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), most likely first
    offset: int | None = None  # characters of the reply before the token; None if they are not counted


class Written(Protocol):
    """The tokens of a reply that were sampled so far."""

    @property
    def completion_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    prompt_tokens: int
    cached_tokens: int
    receipt: CacheReceipt | None = None
    written: Written | None = field(default=None, compare=False)  # it counts while the reply runs


@dataclass(frozen=True, slots=True)
class PromptProgress:
    num_computed_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The usage so far, with the tokens whose deltas follow. It is sent only if the request asks for it."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # one entry per token that this text was decoded from


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    arguments: str  # a fragment of JSON


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int
    is_broken: bool = False  # its arguments were closed as JSON, but cannot be read; its text follows as content


@dataclass(frozen=True, slots=True)
class FoundPage:
    url: str
    title: str
    text: str  # the text that the search gives for the page


SearchError = Literal["invalid_tool_input", "max_uses_exceeded", "query_too_long", "too_many_requests", "unavailable"]


@dataclass(frozen=True, slots=True)
class SearchDone:
    """The server has run the call of this id: a web search. The reply continues with a further generation."""

    call_id: str
    query: str
    pages: tuple[FoundPage, ...] = ()
    error: SearchError | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the call's own


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of all texts, or their scores, in the order of the texts. `Finished` follows."""

    vectors: Sequence[Any]  # each numpy, (dimensions,), float32; one number for a score


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    stop: str | int | None = None  # the stop string or stop token id that ended the reply, if the client named it
    broken_calls: tuple[str, ...] = ()  # the ids of calls that were announced and cannot be read


@dataclass(frozen=True, slots=True)
class Failed:
    error: VLLMMLXError


ContentEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
GenerationEvent = Started | PromptProgress | Counted | ContentEvent | SearchDone | Vectors | Finished | Failed
