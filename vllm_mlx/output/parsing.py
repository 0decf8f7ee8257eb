"""Pieces of a reply's text → events, by the formats' parser. Knows no token ids and no stop strings."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..core.events import (
    ContentEvent,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..core.request import Request
from ..formats import OutputParser, SchemaBudget, Schemas, make_parser, read_schemas
from ..tokens.detokenizer import Piece
from ..tokens.tokenizer import Tokenizer


class ParseStage:
    """Feeds the parser what is text, and counts reasoning tokens and tool calls of its events.

    A piece that the tokenizer calls no part of any text is dropped, unless it is a tag of the format or the request
    asks for such pieces.
    """

    def __init__(self, parser: OutputParser, request: Request):
        self._parser = parser
        self._skips_control = request.sampling.skip_special_tokens
        self._logprobs = None if request.sampling.logprobs is None else LogprobQueue()
        self.calls = CallCounter(request.max_tool_calls)
        self.num_reasoning_tokens = 0
        self.closed_open_call = False  # True if `finish` completed a call that the model had left open

    def add_token(self, logprob: TokenLogprob | None) -> None:
        """Announce a sampled token, before the piece that has its text."""
        if self._logprobs is not None:
            self._logprobs.add_token(logprob)

    def feed(self, piece: Piece) -> list[ContentEvent]:
        """Events after the end of the last permitted tool call are left out."""
        was_in_reasoning = self._parser.in_reasoning
        is_text = not piece.control or not self._skips_control or piece.text in self._parser.markers
        if self._logprobs is not None:
            self._logprobs.add_piece(piece.num_tokens, len(piece.text) if is_text else 0)
        events = self._counted(self._parser.feed(piece.text, piece.special)) if is_text else []
        if was_in_reasoning and self._parser.in_reasoning:
            self.num_reasoning_tokens += piece.num_tokens
        return events

    def feed_end_token(self, text: str) -> list[ContentEvent]:
        """The token that ended the reply is no text, but it may be a tag that the format needs."""
        return self._counted(self._parser.feed(text, special=True)) if text in self._parser.markers else []

    def finish(self, *, is_end: bool) -> list[ContentEvent]:
        """`is_end`: the model ended the reply. The arguments of a call that is still open are then completed."""
        num_calls = self.calls.num_calls
        events = self._counted(self._parser.finish(is_end=is_end))
        self.closed_open_call = self.calls.num_calls > num_calls
        return events

    def _counted(self, events: list[ContentEvent]) -> list[ContentEvent]:
        if self._logprobs is not None:
            events = self._logprobs.attach(events, self._parser.text_starts)
        return self.calls.feed(events)


class CallCounter:
    """Counts tool calls, and cuts the events after the last call that the request permits."""

    def __init__(self, limit: int | None):
        """`limit` None or 0: any number of calls."""
        self._limit = limit
        self.num_calls = 0  # complete calls
        self._num_open = 0

    @property
    def reached_limit(self) -> bool:
        return self._limit is not None and self.num_calls >= self._limit > 0

    @property
    def are_complete(self) -> bool:
        """Whether there are calls, and none is open."""
        return self.num_calls > 0 and self._num_open == 0

    def feed(self, events: list[ContentEvent]) -> list[ContentEvent]:
        for number, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                self._num_open += 1
            elif isinstance(event, ToolCallEnd):
                self._num_open -= 1
                self.num_calls += 1
                if self.reached_limit:
                    return events[: number + 1]
        return events


class LogprobQueue:
    """Tokens that wait until the parser emits their text: the first event that has some of it carries the token."""

    def __init__(self) -> None:
        self._tokens: deque[TokenLogprob | None] = deque()  # tokens whose piece is still to come
        self._spans: deque[tuple[int, int, TokenLogprob]] = deque()  # (start, end, token) in parsed characters
        self._num_chars = 0

    def add_token(self, logprob: TokenLogprob | None) -> None:
        self._tokens.append(logprob)

    def add_piece(self, num_tokens: int, num_chars: int) -> None:
        """The next tokens have the text of the next characters that the parser is fed."""
        start, self._num_chars = self._num_chars, self._num_chars + num_chars
        for _ in range(num_tokens):
            logprob = self._tokens.popleft()
            if logprob is not None and num_chars:
                self._spans.append((start, self._num_chars, logprob))

    def attach(self, events: list[ContentEvent], text_starts: Sequence[int]) -> list[ContentEvent]:
        """`text_starts`: the first parsed character of each text event. Tokens before it were no content."""
        starts = iter(text_starts)
        return [self._with_logprobs(event, next(starts)) if isinstance(event, TextDelta) else event for event in events]

    def _with_logprobs(self, event: TextDelta, start: int) -> TextDelta:
        end = start + len(event.text)
        logprobs: list[TokenLogprob] = []
        while self._spans and self._spans[0][0] < end:
            _, token_end, logprob = self._spans.popleft()
            if token_end > start:
                logprobs.append(logprob)
        return TextDelta(event.text, tuple(logprobs))


def merged(events: Iterable[ContentEvent]) -> list[ContentEvent]:
    """Join neighbouring deltas of one kind."""
    result: list[ContentEvent] = []
    for event in events:
        match result[-1] if result else None, event:
            case TextDelta(before, logprobs), TextDelta(text, more):
                result[-1] = TextDelta(before + text, logprobs + more)
            case ReasoningDelta(before), ReasoningDelta(text):
                result[-1] = ReasoningDelta(before + text)
            case ToolCallDelta(index, before), ToolCallDelta(same, text) if index == same:
                result[-1] = ToolCallDelta(index, before + text)
            case _:
                result.append(event)
    return result


def reply_parser(
    tokenizer: Tokenizer,
    request: Request,
    reasoning: str | None,
    tools: str | None,
    *,
    starts_in_reasoning: bool,
    schemas: Schemas | None = None,
    call_ids: Callable[[], str] | None = None,
) -> OutputParser:
    """A parser for one reply to the request.

    `reasoning` and `tools` are names of formats. `schemas` are those of the declared tools; None reads them here.
    """
    if request.messages is None:
        return make_parser(None, None)
    schemas = declared_schemas(request, SchemaBudget()) if schemas is None else schemas
    return make_parser(
        reasoning,
        tools if schemas else None,
        schemas=schemas,
        starts_in_reasoning=starts_in_reasoning,
        marker_tokens=tokenizer.marker_tokens,
        call_ids=call_ids,
    )


def declared_schemas(request: Request, budget: SchemaBudget) -> Schemas:
    """The schemas of the tools that a reply may call.

    Raises InvalidParameter, naming the tool, when the budget is spent.
    """
    if request.messages is None or request.tool_choice.mode == "none":
        return {}
    declared = (*request.tools, *request.unlisted_tools)
    return read_schemas(((tool.name, tool.parameters, tool.param) for tool in declared), budget)
