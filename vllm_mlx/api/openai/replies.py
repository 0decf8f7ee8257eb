"""Wire types of replies, and the log-probabilities of chat and completions."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from pydantic import Field

from ...core.catalogue import ModelTask
from ...core.config import Capability
from ...core.events import TokenLogprob, Usage
from ..replies import CacheShortfall, FinishDetails, Reply, TokenNames, given, predicted, shortfall_of


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    """The tokens of a `prediction` that were tried: those that the reply took, and the others. Not set without one."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class ChatUsage(Reply):
    """Usage of a reply. `max_completion_tokens`: the requested limit, lowered by the context window.

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
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=usage.reasoning_tokens,
                **predicted(usage),
            ),
            **given(max_completion_tokens=usage.clamped_max_tokens, cache_shortfall=shortfall_of(usage.receipt)),
        )


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ContentLogprob]

    @classmethod
    def of(cls, tokens: Iterable[TokenLogprob], names: TokenNames) -> "ChatLogprobs":
        def top(token_id: int, logprob: float) -> TopLogprob:
            text, spelled = names.token_text(token_id), list(names.token_bytes(token_id))
            return TopLogprob(token=text, logprob=_finite(logprob), bytes=spelled)

        def content(token: TokenLogprob) -> ContentLogprob:
            sampled = top(token.token_id, _finite(token.logprob))
            return ContentLogprob(**dict(sampled), top_logprobs=[top(*likely) for likely in token.top])

        return cls(content=[content(token) for token in tokens])


class FunctionReply(Reply):
    name: str
    arguments: str


class ToolCallReply(Reply):
    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class ChatMessageReply(Reply):
    """A message. `reasoning` repeats `reasoning_content`: a client reads one of the two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallReply] = Field(default_factory=list)


class ChatChoice(Reply):
    """A choice. `stop_reason` is the client's stop string or stop token id that ended the reply."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    finish_details: FinishDetails | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(cls, tokens: Sequence[TokenLogprob], names: TokenNames, offset: int = 0) -> "CompletionLogprobs":
        """Describe tokens, each among its likeliest ones. `offset`: the characters of the reply before these tokens."""
        texts = [names.token_text(token.token_id) for token in tokens]
        tops = [
            {text if token_id == token.token_id else _name(token_id, names): _finite(p) for token_id, p in token.top}
            for text, token in zip(texts, tokens, strict=True)
        ]
        places = accumulate(map(len, texts), initial=offset)
        return cls(
            tokens=texts,
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token in tokens],
            top_logprobs=[
                None if token.logprob is None else {**top, text: _finite(token.logprob)}
                for top, text, token in zip(tops, texts, tokens, strict=True)
            ],
            text_offset=[next(places) if token.offset is None else token.offset for token in tokens],
        )


def _name(token_id: int, names: TokenNames) -> str:
    """Return the token's text, or its bytes if it has incomplete characters, since other tokens have that text."""
    spelled = names.token_bytes(token_id)
    text = spelled.decode(errors="replace")
    return text if text.encode() == spelled else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(Reply):
    """A complete reply, or a chunk of a stream, which has the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None


LoadValue = Literal["loaded", "loading", "unloaded", "failed"]
LOADED: Mapping[str, LoadValue] = {  # by the state of a model
    "ready": "loaded", "leaving": "loaded", "loading": "loading", "unloaded": "unloaded", "failed": "failed",
}  # fmt: skip


class LoadStatus(Reply):
    """The place of the weights, in llama.cpp's words."""

    value: LoadValue


class ModelCard(Reply):
    """A model with the fields that OpenAI's clients read, and the ones that Anthropic's clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int  # 0 for one of `models_from` that was not asked for yet
    owned_by: str
    root: str
    max_model_len: int  # 0 if the files of a checkpoint do not say
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    state: Literal["ready", "loading", "unloaded", "failed"]
    status: LoadStatus
    load_bytes: int  # that the weights take while they are in memory
    pinned: bool  # whether the weights leave for no other model
    aliases: list[str]  # other names of the same model
    task: ModelTask  # chat needs a chat template; vision: images too
    found: bool = False  # whether it is one of `models_from` without its own entry
    cause: str | None = None  # why it is not served; it is not set for a model that is
    capabilities: list[Capability]  # inputs in addition to text, and kinds of output
    web_search: bool  # whether this server runs the searches that a model asks for


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


FLOOR = -9999.0  # written for minus infinity, which JSON does not have


def _finite(logprob: float | None) -> float:
    return FLOOR if logprob is None or logprob != logprob else max(logprob, FLOOR)
