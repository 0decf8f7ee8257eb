"""Parts of all protocols' replies: the base type, stream encoders, the fold of a complete reply, usage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict

from ..core.errors import VLLMMLXError
from ..core.events import Finished, GenerationEvent, TextDelta, TokenLogprob, ToolCallStart, Usage
from ..core.receipt import CacheReceipt
from .blocks import BlockEnd, BlockSplitter, Kind, ReasoningMode

MAX_ERROR_CHARS = 1_000
MANY_LOGPROBS = 1_000  # to write more takes some 10 ms, for which an event loop must not wait


def _document_literals(schema: dict[str, Any], reply: type["Reply"]) -> None:
    """Literals are always sent, so they are required fields without a default."""
    for name in reply._literals:
        schema["properties"][name].pop("default", None)
    required = {*schema.get("required", ()), *reply._literals}
    schema["required"] = [name for name in schema["properties"] if name in required]


class Reply(BaseModel):
    """A field that was not set is not sent, unless it is a literal; one that was set to null is null."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_document_literals)
    _literals: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = cls.model_fields.items()
        cls._literals = frozenset(name for name, field in fields if get_origin(field.annotation) is Literal)

    def model_post_init(self, _: Any) -> None:
        self.model_fields_set.update(self._literals)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields of a reply that have a value; the others are not set."""
    return {name: value for name, value in fields.items() if value is not None}


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"


ErrorText = Annotated[str, AfterValidator(_bounded)]  # bounded, since an error may quote a client's text


def total_usage(usages: Mapping[int, Usage], choices_per_prompt: int) -> Usage:
    """Sum the usage of all choices of a reply, by their indices.

    A prompt that several choices share counts once, with the `cached_tokens` of the choice that computed most of it.
    """
    prompts: dict[int, Usage] = {}
    for index, usage in usages.items():
        known = prompts.setdefault(index // choices_per_prompt, usage)
        if usage.cached_tokens < known.cached_tokens:
            prompts[index // choices_per_prompt] = usage
    limits = [usage.clamped_max_tokens for usage in usages.values() if usage.clamped_max_tokens is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
        cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages.values()),
        **predicted(*usages.values()),
        clamped_max_tokens=min(limits, default=None),
        receipt=next((usage.receipt for usage in prompts.values() if usage.receipt is not None), None),
    )


def predicted(*usages: Usage) -> dict[str, int]:
    """Sum the tokens of the prediction, as fields of `Usage`. They are not set if none was sent."""
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    counts = {name: [count for usage in usages if (count := getattr(usage, name)) is not None] for name in names}
    return {name: sum(given) for name, given in counts.items() if given}


class CacheShortfall(Reply):
    """A part of the usage block, the same in all protocols."""

    reason: str
    expected_tokens: int
    stored_tokens: int
    detail: str


def shortfall_of(receipt: CacheReceipt | None) -> CacheShortfall | None:
    """Describe missing cached tokens. Returns None if as many were cached as expected."""
    if receipt is None or receipt.shortfall is None:
        return None
    return CacheShortfall(
        reason=receipt.shortfall.value,
        expected_tokens=receipt.expected_tokens,
        stored_tokens=receipt.stored_tokens,
        detail=receipt.why or "",
    )


class FinishDetails(Reply):
    """A part of a reply's end, the same in all protocols. A call is broken if its arguments cannot be read."""

    broken_tool_calls: list[str]  # their ids; a complete reply has their text as content instead


def finish_details(event: Finished, wire_id: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the field of a reply that has broken calls, or none. `wire_id` returns an id as the client knows it."""
    ids = [wire_id(call_id) for call_id in event.broken_calls]
    return {"finish_details": FinishDetails(broken_tool_calls=ids)} if ids else {}


class StreamEncoder(Protocol):
    """Writes the event stream of one reply.

    `open`, then `feed` for every event except Failed, then either `close` or `fail`; `keep_alive` at any moment
    between `open` and the end. Empty bytes mean that there is nothing to send.
    """

    def open(self) -> bytes: ...

    def feed(self, index: int, event: GenerationEvent) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def fail(self, error: VLLMMLXError) -> bytes: ...

    def close(self) -> bytes: ...


class TokenNames(Protocol):
    """Writes single tokens in log-probabilities."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class FoldedChoice:
    """Collects the blocks of one choice of a reply. `logprobs` are those of its text."""

    def __init__(self, reasoning: ReasoningMode = "separate") -> None:
        self._splitter = BlockSplitter(reasoning)
        self._end: Finished | None = None
        self.blocks: list[BlockEnd] = []
        self.logprobs: list[TokenLogprob] = []

    def feed(self, event: GenerationEvent) -> None:
        ended = (block for block in self._splitter.feed(event) if isinstance(block, BlockEnd))
        self.blocks += [block for block in ended if not block.is_broken]
        match event:
            case TextDelta(logprobs=logprobs):
                self.logprobs += logprobs
            case Finished():
                self._end = event

    @property
    def finished(self) -> Finished:
        assert self._end is not None, "a reply is folded after every choice has finished"
        return self._end

    def text(self, *kinds: Kind) -> str:
        """Return the text of all blocks of these kinds."""
        return "".join(block.text for block in self.blocks if block.kind in kinds)

    @property
    def calls(self) -> list[tuple[ToolCallStart, str]]:
        """Each call and its arguments, which are JSON unless the reply ended inside them."""
        return [(block.call, block.text) for block in self.blocks if block.call is not None]


class ReplyFold:
    """Folds the same events into one reply: `feed` for every event except Failed, then `finish` once.

    `write` makes the reply from its choices, in their order.
    """

    def __init__(
        self,
        write: Callable[[Sequence[FoldedChoice]], Reply],
        *,
        num_choices: int = 1,
        reasoning: ReasoningMode = "separate",
    ) -> None:
        self._write = write
        self._choices = [FoldedChoice(reasoning) for _ in range(num_choices)]

    def feed(self, index: int, event: GenerationEvent) -> None:
        self._choices[index].feed(event)

    @property
    def is_long(self) -> bool:
        """Return whether `finish` takes long, and may run on a thread."""
        return sum(len(choice.logprobs) for choice in self._choices) > MANY_LOGPROBS

    def finish(self) -> bytes:
        return self._write(self._choices).to_json().encode()
