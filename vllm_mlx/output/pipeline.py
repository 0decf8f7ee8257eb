"""Sampled tokens of one reply → events. One per sequence; lives on the event loop."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..core.events import (
    ContentEvent,
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from ..core.request import Request
from ..core.sequence import PromptInputs
from ..core.step import TokenOutput
from ..formats import OutputParser, SchemaBudget, Schemas, make_parser, read_schemas
from ..tokens.detokenizer import Detokenizer, Piece
from ..tokens.tokenizer import Tokenizer
from .logprobs import LogprobQueue
from .reply import FinishedReply, ReplyBuilder
from .stop import StopMatcher


class OutputPipeline:
    """detokenizer → stop strings → tokens that are no text dropped → parser → events.

    `stop_token_ids`: the ids that end the sequence. Tokens after the reply was `stopped` are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        prompt: PromptInputs,
        *,
        reasoning: str | None = None,  # names of the formats
        tools: str | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        clamped_max_tokens: int | None = None,
        schemas: Schemas | None = None,  # of the declared tools; None: they are read here
        call_ids: Callable[[], str] | None = None,
    ):
        sampling = request.sampling
        self._tokenizer = tokenizer
        self._request = request
        self._num_prompt_tokens = len(prompt.token_ids)
        self._stop_token_ids = stop_token_ids
        self._clamped_max_tokens = clamped_max_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids)
        self._stop = (
            StopMatcher(sampling.stop, include_match=sampling.include_stop_str_in_output) if sampling.stop else None
        )
        self._unsafe: deque[Piece] = deque()  # in the stop matcher
        self._num_safe_chars = 0  # of `_unsafe`
        self._parser = reply_parser(
            tokenizer,
            request,
            reasoning,
            tools,
            starts_in_reasoning=prompt.starts_in_reasoning,
            schemas=schemas,
            call_ids=call_ids,
        )
        self._reply = ReplyBuilder()
        self._token_ids: list[int] = []
        self._logprobs = LogprobQueue() if sampling.logprobs is not None else None
        self._echo = _echo(tokenizer, request, prompt)
        self._maybe_last: TokenOutput | None = None  # a stop token, while nobody knows whether it ended the reply
        self._matched_stop: str | None = None
        self._num_piece_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_open_calls = 0
        self._num_calls = 0
        self._was_closed = False  # a call was, which the model left open
        self.stopped = False

    def feed(self, tokens: Sequence[TokenOutput]) -> list[ContentEvent]:
        out = self._take_echo()
        for token in tokens:
            self._settle(out)
            if self.stopped:
                break
            self._token_ids.append(token.token_id)
            if token.token_id in self._stop_token_ids:
                self._maybe_last = token
            else:
                self._feed_token(token, out)
        self._reply.feed(out)
        return merged(out)

    @property
    def reply(self) -> FinishedReply:
        """So far; a stop token counts as soon as it was fed."""
        is_complete = self._reply.is_complete and not self._was_closed
        return FinishedReply(message=self._reply.message(), token_ids=tuple(self._token_ids), is_complete=is_complete)

    def finish(
        self, reason: FinishReason, stop_token_id: int | None = None, *, cached_tokens: int = 0
    ) -> list[GenerationEvent]:
        """`stop_token_id` contributes no text, unless it is a tag that the format needs.

        A call that only a limit left open stays open. Where the model ended its turn inside one, its arguments are made
        whole: whatever is called complete can be run.
        """
        out = self._take_echo()
        if not self.stopped:
            last, self._maybe_last = self._maybe_last, None
            is_end = last is not None and reason is FinishReason.STOP and last.token_id == stop_token_id
            if last is not None and not is_end:
                self._feed_token(last, out)
            self._flush(out)
            if last is not None and is_end and not self.stopped:
                self._feed_end_tag(last.token_id, out)
        if self._matched_stop is not None or not self.stopped:
            self._finish_parser(reason, out)
        self.stopped = True
        self._reply.feed(out)
        return [*merged(out), self._finished(reason, stop_token_id, cached_tokens)]

    def _finish_parser(self, reason: FinishReason, out: list[ContentEvent]) -> None:
        num_calls = self._num_calls
        is_end = reason is FinishReason.STOP or self._matched_stop is not None
        self._add(self._parser.finish(is_end=is_end), out)
        self._was_closed = self._num_calls > num_calls

    def _finished(self, reason: FinishReason, stop_token_id: int | None, cached_tokens: int) -> Finished:
        stop: str | int | None = self._matched_stop
        if stop is not None or self._has_all_calls:
            reason = FinishReason.STOP
        elif stop_token_id in self._request.sampling.stop_token_ids:
            stop = stop_token_id
        if reason is FinishReason.STOP and self._num_calls and not self._num_open_calls:
            reason = FinishReason.TOOL_CALLS
        usage = Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=len(self._token_ids),
            reasoning_tokens=self._num_reasoning_tokens,
            clamped_max_tokens=self._clamped_max_tokens,
        )
        return Finished(reason, usage, stop)

    @property
    def _has_all_calls(self) -> bool:
        limit = self._request.max_tool_calls
        return limit is not None and self._num_calls >= limit > 0

    def _take_echo(self) -> list[ContentEvent]:
        text, self._echo = self._echo, ""
        return [TextDelta(text)] if text else []

    def _settle(self, out: list[ContentEvent]) -> None:
        """The reply went on behind a stop token, so that is text like any other."""
        if self._maybe_last is not None:
            token, self._maybe_last = self._maybe_last, None
            self._feed_token(token, out)

    def _feed_token(self, token: TokenOutput, out: list[ContentEvent]) -> None:
        if self._logprobs is not None:
            self._logprobs.add_token(token.logprob)
        for piece in self._detokenizer.feed(token.token_id):
            self._feed_piece(piece, out)

    def _flush(self, out: list[ContentEvent]) -> None:
        for piece in self._detokenizer.finish():
            self._feed_piece(piece, out)
        if self._stop is not None and not self.stopped:
            self._num_safe_chars += len(self._stop.finish())
            self._release(out, final=True)

    def _feed_end_tag(self, token_id: int, out: list[ContentEvent]) -> None:
        added = self._tokenizer.added_token(token_id)
        if added is not None and added[0] in self._parser.markers:
            self._add(self._parser.feed(added[0], special=True), out)

    # Stop strings

    def _feed_piece(self, piece: Piece, out: list[ContentEvent]) -> None:
        if self.stopped:
            return
        self._num_piece_tokens += piece.num_tokens
        if self._stop is None or self._num_piece_tokens < self._request.sampling.min_tokens:
            self._parse(piece, out)
            return
        safe, self._matched_stop = self._stop.feed(piece.text)
        self._unsafe.append(piece)
        self._num_safe_chars += len(safe)
        self._release(out, final=self._matched_stop is not None)
        self.stopped = self.stopped or self._matched_stop is not None

    def _release(self, out: list[ContentEvent], *, final: bool) -> None:
        """Parse what no stop string can take back. An added token is released whole, or, at the end, as plain text."""
        while self._unsafe and (self._num_safe_chars or not self._unsafe[0].text):
            piece = self._unsafe[0]
            if len(piece.text) > self._num_safe_chars:
                if piece.special and not final:
                    return
                safe, rest = piece.text[: self._num_safe_chars], piece.text[self._num_safe_chars :]
                self._unsafe[0] = Piece(rest, 0)
                piece = Piece(safe, piece.num_tokens)
            else:
                self._unsafe.popleft()
            self._num_safe_chars -= len(piece.text)
            self._parse(piece, out)

    # Events

    def _parse(self, piece: Piece, out: list[ContentEvent]) -> None:
        if self.stopped:
            return
        parser = self._parser
        was_in_reasoning = parser.in_reasoning
        is_text = not piece.control or not self._request.sampling.skip_special_tokens or piece.text in parser.markers
        if self._logprobs is not None:
            self._logprobs.add_piece(piece.num_tokens, len(piece.text) if is_text else 0)
        if is_text:
            self._add(parser.feed(piece.text, piece.special), out)
        if was_in_reasoning and parser.in_reasoning:
            self._num_reasoning_tokens += piece.num_tokens

    def _add(self, events: list[ContentEvent], out: list[ContentEvent]) -> None:
        if self._logprobs is not None:
            events = self._logprobs.attach(events, self._parser.text_starts)
        for event in events:
            out.append(event)
            self._num_open_calls += isinstance(event, ToolCallStart) - isinstance(event, ToolCallEnd)
            if isinstance(event, ToolCallEnd):
                self._num_calls += 1
                if self._has_all_calls:
                    self.stopped = True
                    return


def merged(events: Iterable[ContentEvent]) -> list[ContentEvent]:
    """Neighbouring deltas of one kind as one."""
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
    """For one reply to the request. `reasoning`, `tools`: names of the formats; `schemas`: None reads them here."""
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
    """Of the tools that a reply may call. Raises InvalidParameter, naming the tool, when the budget is spent."""
    if request.messages is None or request.tool_choice.mode == "none":
        return {}
    declared = (*request.tools, *request.unlisted_tools)
    return read_schemas(((tool.name, tool.parameters, tool.param) for tool in declared), budget)


def _echo(tokenizer: Tokenizer, request: Request, prompt: PromptInputs) -> str:
    if not request.echo or request.messages is not None:
        return ""
    if isinstance(request.prompt, str):
        return request.prompt
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=request.sampling.skip_special_tokens)
