"""One sequence in the engine, and the constraints on its tokens: ids in, ids out. It knows neither text nor mlx."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from .events import FinishReason, TokenLogprob
from .receipt import NO_RECEIPT, CacheReceipt
from .request import MAX_INTEGER, TokenSampling


class Tag(Enum):
    """The tag that a reply's last token completed."""

    START = auto()  # the tag that opens reasoning
    END = auto()  # the tag that ends reasoning
    CALL = auto()  # opens a tool call, which also ends reasoning


class TagWatch(Protocol):
    """Follows one reply's tokens; a token costs the same at any length of the reply.

    `leftover`: the text after the last tag, if the tag's last token contains such text; it is tokenized again.
    """

    leftover: tuple[int, ...]

    def feed(self, token_id: int) -> Tag | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningRule:
    """The token ids that begin and end reasoning."""

    new_watch: Callable[[], TagWatch]
    starts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]  # forced when the budget is spent
    is_open: bool  # the prompt has opened the reasoning
    may_open: bool  # the reply may begin with reasoning
    budget: int | None = None  # tokens of reasoning before each answer; None if there is no limit
    prompt_reasoning: tuple[int, ...] = ()  # reasoning tokens already in the prompt; they count against the budget
    layout: tuple[int, ...] = ()  # line breaks: one may separate the reasoning from the text that a grammar constrains


@dataclass(frozen=True, slots=True)
class NameHold:
    """A grammar of free text with calls to declared tools. A reply is free where the grammar accepts it as a whole.

    `matcher`: an llguidance.LLMatcher at its start; `cut_ids`: tokens that end inside a character.
    """

    matcher: Any
    cut_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Constraints on the tokens of one reply: a grammar or the names of its calls, and the budget of its reasoning.

    All replies to a request share it.

    `matcher` is an llguidance.LLMatcher at its start, opaque here; every reply uses a copy. It is None without a
    grammar.
    """

    matcher: Any = None
    param: str = ""  # the request field that asks for the grammar
    mask_words: int = 0  # 32-bit words of a mask over the vocabulary
    reasoning: ReasoningRule | None = None  # if None, the grammar constrains the reply from its first token on
    barred: tuple[int, ...] = ()  # not allowed in reasoning: the grammar could not continue after these tokens
    names: NameHold | None = None  # None if a grammar restricts the names of calls, or nothing does
    refuse: Callable[[], None] | None = None  # called if the grammar was too slow: no other reply may have it


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions of tokens that are laid out in a grid, counted from the position at which they begin."""

    positions: Any  # numpy, (3, tokens), int32
    advance: int  # positions from there to the first token after the grid


class EncoderInputs(Protocol):
    """The arrays of one media item for the vision encoder. They may be dropped and made again."""

    def prepare(self) -> bool:
        """Return whether `get` can return. Otherwise begin to make the arrays; the engine is woken once they exist."""
        ...

    def get(self) -> Mapping[str, Any]:
        """Return numpy arrays by name. Never waits. Raises the error of making them."""
        ...

    def drop(self) -> None:
        """Free the arrays: the vision encoder has run."""
        ...


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, or a piece of a video, inside one prompt: its tokens are `[offset, offset + length)`.

    The range reaches from its first placeholder to the last. A video's own text (timestamps) may lie in between.
    """

    digest: bytes  # a digest of encoder inputs, placeholders, layout and processor settings
    offset: int
    length: int
    inputs: Mapping[str, Any] | EncoderInputs  # for the vision encoder
    layout: Layout | None = None  # set for families that place media in a grid

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedTexts:
    """The texts that an encoder reads for one request, one after the other."""

    ids: "array[int]"  # unsigned, 32 bits
    ends: tuple[int, ...]  # the position behind each text
    types: "array[int] | None" = None  # bytes: the type of each token; None where all have type 0
    answer_ids: tuple[int, ...] = ()  # yes and no of a causal reranker, whose first text begins all of its prompts

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each text."""
        return zip((0, *self.ends), self.ends, strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInputs:
    """A prompt as the engine takes it."""

    token_ids: tuple[int, ...]
    texts: TokenizedTexts | None = None  # instead of `token_ids`, for an encoder
    media: tuple[MediaItem, ...] = ()
    snapshot_points: tuple[int, ...] = ()  # token counts worth keeping for a later turn
    starts_in_reasoning: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids if self.texts is None else self.texts.ids)


class SequenceStatus(Enum):
    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One choice of a request in the engine.

    `num_computed_tokens` is its one progress variable: the number of tokens whose state the runner holds or is
    computing. The token at that position is fed next. While a sampled token has not been read back from the device,
    the count may exceed `num_tokens - 1`; `num_in_flight` says by how much.
    """

    seq_id: int
    prompt: PromptInputs
    sampling: TokenSampling
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # with the end-of-sequence ids, unless they are ignored
    constraint: Constraint | None = None
    cache_salt: str = ""
    max_stored: int = MAX_INTEGER  # tokens of it that the prefix cache may store
    prediction: Any = ()  # tokens that the client expects in the reply, or a cache.prompt_index.PromptIndex of them
    prompt_index: Any = None  # a cache.prompt_index.PromptIndex; None if no drafts are taken from the prompt
    tenant: str = ""  # the owner of the request; tenants take turns
    model: int = 0  # the position of its model
    scores_prompt: bool = False  # its reply shows the log-probabilities of the prompt's tokens
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens from the second one on
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    receipt: CacheReceipt = NO_RECEIPT  # of the look-up at its first admission; it knows no expectation
    scheduled_s: float | None = None  # time of its first admission, by the scheduler's clock
    num_predicted: int = 0  # tokens of the prediction that the reply confirmed as drafts
    num_mispredicted: int = 0  # tokens of the prediction that were computed as drafts and not taken
    num_preemptions: int = 0  # including restarts after a fault
    num_faults: int = 0  # device faults since its last token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended the sequence

    @property
    def is_ahead(self) -> bool:
        """Return whether it computes the beginning of a next prompt, for no client. A request's id is not negative."""
        return self.seq_id < 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.output_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of prompt tokens taken from the prefix cache at its first admission."""
        return self.receipt.cached_tokens

    @property
    def num_in_flight(self) -> int:
        """Return the number of samples launched on the device and not read back yet."""
        return max(0, self.num_computed_tokens - self.num_tokens + 1)

    @property
    def prefill_end(self) -> int:
        """Return the position where prefill stops. The decode step feeds the last known token, and samples after it."""
        return self.num_tokens - 1

    @property
    def decode_end(self) -> int:
        """The position where decode stops: the last token that the reply may have is not fed."""
        return len(self.prompt.token_ids) + max(1, self.max_tokens) - 1

    @property
    def is_scored(self) -> bool:
        """Return whether all log-probabilities of the prompt that the reply shows are known."""
        return not self.scores_prompt or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    def take(self, token_id: int) -> FinishReason | None:
        """Add a token to the reply. Returns the reason why the reply ends with it, if it does."""
        self.num_faults = 0
        if not self.max_tokens:  # only the prompt was asked for
            return FinishReason.LENGTH
        self.output_token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.stop_token_id = token_id
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_token_ids) >= self.max_tokens else None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids at positions `[start, end)` of prompt + output."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return list(self.prompt.token_ids[start:end])
        return [
            *self.prompt.token_ids[start:num_prompt],
            *self.output_token_ids[max(0, start - num_prompt) : end - num_prompt],
        ]

    def media_key(self, item: MediaItem) -> tuple[str, bytes]:
        """Return the key of an image's features in their cache. Requests of different salts share no features."""
        return self.cache_salt, item.digest

    def key(self) -> tuple[int, ...]:
        """Return token ids, with every media placeholder replaced by an id made from the media's digest.

        Such ids have 63 bits with the top one set, outside any vocabulary, so two images of one size never share a
        key, and neither cache nor scheduler knows of images.
        """
        ids = [*self.prompt.token_ids, *self.output_token_ids]
        for item in self.prompt.media:
            media_id = (1 << 62) | (int.from_bytes(item.digest[:8], "big") >> 2)
            ids[item.offset : item.end] = [media_id] * item.length
        return tuple(ids)
