"""Wire types of replies, and the log-probabilities of chat and completions."""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from ...core.events import TokenLogprob, Usage
from ..replies import CacheShortfall, Reply, TokenNames, shortfall_of


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int


class ChatUsage(Reply):
    """`max_completion_tokens` is set if the context window lowered the requested limit: to that number.

    `cache_shortfall` is set if less of the prompt was cached than an earlier turn made likely.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    max_completion_tokens: int | None = None
    cache_shortfall: CacheShortfall | None = None

    @classmethod
    def of(cls, usage: Usage) -> "ChatUsage":
        reply = cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        )
        if usage.clamped_max_tokens is not None:
            reply.max_completion_tokens = usage.clamped_max_tokens
        if (shortfall := shortfall_of(usage.receipt)) is not None:
            reply.cache_shortfall = shortfall
        return reply


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ContentLogprob]


class FunctionReply(Reply):
    name: str
    arguments: str


class ToolCallReply(Reply):
    id: str
    type: Literal["function"]
    function: FunctionReply


class ChatMessageReply(Reply):
    """`reasoning` repeats `reasoning_content`: a client reads one of the two names."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallReply] = Field(default_factory=list)


class ChatChoice(Reply):
    """`stop_reason` is the client's stop string or stop token id that ended the reply."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class FunctionChunk(Reply):
    name: str = ""
    arguments: str


class ToolCallChunk(Reply):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionChunk


class Delta(Reply):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallChunk] = Field(default_factory=list)


class ChunkChoice(Reply):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(Reply):
    """A complete reply, or a chunk of a stream, which has the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None


class ModelCard(Reply):
    """A model with the fields that OpenAI's clients read, and the ones that Anthropic's clients read."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False]


FLOOR = -9999.0  # written for minus infinity, which JSON does not have


def chat_logprobs(tokens: Iterable[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs(content=[_content(token, names) for token in tokens])


def _content(token: TokenLogprob, names: TokenNames) -> ContentLogprob:
    return ContentLogprob(
        token=names.token_text(token.token_id),
        logprob=_finite(token.logprob),
        bytes=list(names.token_bytes(token.token_id)),
        top_logprobs=[
            TopLogprob(
                token=names.token_text(token_id), logprob=_finite(logprob), bytes=list(names.token_bytes(token_id))
            )
            for token_id, logprob in token.top
        ],
    )


class CompletionLogprobWriter:
    """Writes log-probabilities part by part: `text_offset` counts characters from the start of the reply."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        texts = [self._names.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[_finite(token.logprob) for token in tokens],
            top_logprobs=[
                {self._names.token_text(token_id): _finite(logprob) for token_id, logprob in token.top}
                for token in tokens
            ],
            text_offset=offsets,
        )


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR) if logprob == logprob else FLOOR
