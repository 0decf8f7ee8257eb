"""The parser of one reply, and what its events are counted and joined by. Knows no token ids and no stop strings."""

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
from ..tokens.tokenizer import Tokenizer


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
