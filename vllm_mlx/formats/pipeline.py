"""Sampled tokens of one reply → events. Each reply has its own pipeline, on the event loop.

The parser at its end finds the tags of a reply. It knows no family: formats and bodies are given.
"""

import secrets
import string
from collections.abc import Callable, Iterable, Sequence

from ..core.events import (
    ContentEvent,
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from ..core.request import Request
from ..core.sequence import Constraint, PromptInputs
from ..core.step import TokenOutput
from .bodies.tool_schema import SchemaBudget, Schemas, read_schemas
from .call import CallParser, new_call_id
from .call_formats import GENERIC
from .content import MAX_MARGIN, ContentWriter, Pending
from .families import with_tags_only
from .family import Calls, ReasoningFormat, ReasoningOpening, ToolFormat
from .logprobs import LogprobQueue, echo_logprobs, echoed_text
from .reasoning import ReasoningWriter
from .reply import FinishedReply, ReplyBuilder, content_of
from .selection import ReplyFormats
from .stop import StopStage
from .tokenizer import Detokenizer, Piece, Tokenizer
from .vocabulary import TagVocabulary, tag_vocabulary


class OutputPipeline:
    """Detokenizer → stop strings → parser → events. Every stage has `feed` and `finish`.

    A control token has no text, unless it is a tag of the format or the request asks for such tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        prompt: PromptInputs,
        formats: ReplyFormats,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        clamped_max_tokens: int | None = None,
        schemas: Schemas | None = None,
        call_ids: Callable[[], str] | None = None,
        constraint: Constraint | None = None,
        max_silent_tokens: int | None = None,
    ):
        """`stop_token_ids` end the sequence. `schemas` are those of the declared tools; None reads them here.

        `call_ids` makes the ids of tool calls. `constraint` is the one that the engine applies. A reply without text
        and tool calls ends after `max_silent_tokens`.
        """
        self._tokenizer = tokenizer
        self._request = request
        self._prompt_ids = prompt.token_ids
        self._echoed: tuple[TokenLogprob, ...] = ()  # the tokens of the echo
        self._clamped_max_tokens = clamped_max_tokens
        self._stop_token_ids = stop_token_ids
        self._stop_token: TokenOutput | None = None  # the last token, if it is a stop token
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids)
        self._stop = StopStage(request.sampling)
        self._parser = reply_parser(
            tokenizer,
            request,
            formats,
            starts_in_reasoning=prompt.starts_in_reasoning,
            opening=_opening(constraint),
            schemas=schemas,
            call_ids=call_ids,
        )
        self._echo = echoed_text(tokenizer, request, prompt)
        num_echoed = len(self._echo or "") if request.max_prompt_logprobs else None
        self._logprobs = None if request.sampling.logprobs is None else LogprobQueue(num_echoed)
        self._calls = CallCounter(request.max_tool_calls)
        self._num_reasoning_tokens = 0
        self._closed_open_call = False  # True if `finish` completed a call that the model had left open
        self._reply = ReplyBuilder()
        self._fills_content = _fills_content(request, formats, is_opened=prompt.starts_in_reasoning)
        self._max_silent_tokens = max_silent_tokens  # becomes None once the reply has text or a tool call
        self.is_silent = False  # whether the reply was ended because it had neither
        self.counts = request.counts  # whether the stream carries the usage so far
        self.stopped = False  # by a stop string, the last permitted tool call or silence; further tokens are ignored

    def feed_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take the log-probabilities of the prompt's tokens from the second one on. The next call sends them.

        It takes long for a long prompt, and may run on a separate thread.
        """
        if self._echo is not None and self._request.max_prompt_logprobs and not self._echoed:
            self._echoed = echo_logprobs(self._tokenizer, self._echo, self._prompt_ids, logprobs)

    def feed(self, tokens: Sequence[TokenOutput]) -> list[ContentEvent]:
        out = self._take_echo()
        for token in tokens:
            last, self._stop_token = self._stop_token, None
            if last is not None:  # the reply continued after a stop token: it is text like any other token
                self._feed_token(last, out)
            if self.stopped:
                break
            self._reply.add_token(token.token_id)
            if token.token_id in self._stop_token_ids:
                self._stop_token = token
            else:
                self._feed_token(token, out)
                self._watch_silence(out)
        return self._emit(out)

    def _watch_silence(self, out: list[ContentEvent]) -> None:
        """End the reply if it has reached the limit of tokens without text (other than white space) and tool calls."""
        if self._max_silent_tokens is None:
            return
        if any(isinstance(event, ToolCallStart) or _is_shown(event) for event in out):
            self._max_silent_tokens = None
        elif not self.stopped and self._reply.num_tokens >= self._max_silent_tokens:
            self.is_silent = self.stopped = True

    @property
    def reply(self) -> FinishedReply:
        """Return the reply so far. It includes a stop token as soon as it was fed."""
        return self._reply.reply(is_cut=self._closed_open_call)

    def finish(
        self, reason: FinishReason, stop_token_id: int | None = None, *, cached_tokens: int = 0
    ) -> list[GenerationEvent]:
        """`stop_token_id` adds no text, unless it is a tag that the format needs.

        A tool call that a limit interrupted stays open. Where the model ended its turn inside a call, its arguments
        are completed: every call that is reported as complete can be run.
        """
        out = self._take_echo()
        if not self.stopped:
            self._finish_text(reason, stop_token_id, out)
        if self._stop.matched is not None or self.is_silent or not self.stopped:
            is_end = not self.is_silent and (reason is FinishReason.STOP or self._stop.matched is not None)
            num_calls = self._calls.num_calls
            out += self._counted(self._parser.finish(is_end=is_end))
            self._closed_open_call = self._calls.num_calls > num_calls
        if self._logprobs is not None:
            out += self._logprobs.rest()
        self.stopped = True
        events = self._emit(out)
        if self._fills_content:
            events += self._emit(content_of(self._reply.message()))
        return [*events, self._finished(reason, stop_token_id, cached_tokens)]

    def _emit(self, out: list[ContentEvent]) -> list[ContentEvent]:
        self._reply.feed(out)
        return merged(out)

    def _take_echo(self) -> list[ContentEvent]:
        self.feed_prompt(())  # if it has one token, nothing was fed
        text, self._echo = self._echo, None
        tokens, self._echoed = self._echoed, ()
        return [] if text is None else [TextDelta(text, tokens)]

    def _feed_token(self, token: TokenOutput, out: list[ContentEvent]) -> None:
        if self._logprobs is not None:
            self._logprobs.add_token(token.logprob)
        self._feed_pieces(self._detokenizer.feed(token.token_id), out)

    def _feed_pieces(self, pieces: Sequence[Piece], out: list[ContentEvent]) -> None:
        for piece in pieces:
            if not self.stopped:
                self._parse_pieces(self._stop.feed(piece), out)
                self.stopped = self.stopped or self._stop.matched is not None

    def _parse_pieces(self, pieces: Sequence[Piece], out: list[ContentEvent]) -> None:
        for piece in pieces:
            if not self.stopped:
                out += self._parse(piece)
                self.stopped = self._calls.reached_limit

    def _parse(self, piece: Piece) -> list[ContentEvent]:
        """Return the events of a piece, up to the end of the last permitted tool call."""
        was_in_reasoning = self._parser.in_reasoning
        skips_control = self._request.sampling.skip_special_tokens
        is_text = not (piece.control and skips_control) or piece.text in self._parser.markers
        if self._logprobs is not None:
            self._logprobs.add_piece(piece.num_tokens, len(piece.text) if is_text else 0)
        events = self._counted(self._parser.feed(piece.text, piece.special)) if is_text else []
        if was_in_reasoning and self._parser.in_reasoning:
            self._num_reasoning_tokens += piece.num_tokens
        return events

    def _counted(self, events: list[ContentEvent]) -> list[ContentEvent]:
        if self._logprobs is not None:
            events = self._logprobs.attach(events, self._parser.text_spans)
        return self._calls.feed(events)

    def _finish_text(self, reason: FinishReason, stop_token_id: int | None, out: list[ContentEvent]) -> None:
        last, self._stop_token = self._stop_token, None
        is_end = last is not None and reason is FinishReason.STOP and last.token_id == stop_token_id
        if last is not None and not is_end:
            self._feed_token(last, out)
        self._feed_pieces(self._detokenizer.finish(), out)
        if not self.stopped:
            self._parse_pieces(self._stop.finish(), out)
        added = None if last is None else self._tokenizer.added_token(last.token_id)
        if is_end and added is not None and not self.stopped and added[0] in self._parser.markers:
            out += self._counted(self._parser.feed(added[0], special=True))  # it is never text
            self.stopped = self._calls.reached_limit
        if is_end and last is not None and not self.stopped and self._logprobs is not None:
            self._logprobs.add_token(last.logprob)
            self._logprobs.add_piece(1, 0)

    def _finished(self, reason: FinishReason, stop_token_id: int | None, cached_tokens: int) -> Finished:
        stop: str | int | None = self._stop.matched
        if self.is_silent:
            reason = FinishReason.LENGTH
        elif stop is not None or self._calls.reached_limit:
            reason = FinishReason.STOP
        elif stop_token_id in self._request.sampling.stop_token_ids:
            stop = stop_token_id
        if reason is FinishReason.STOP and self._calls.are_complete:
            reason = FinishReason.TOOL_CALLS
        return Finished(reason, self.usage(cached_tokens), stop, tuple(self._calls.broken))

    def usage(self, cached_tokens: int) -> Usage:
        """Return the usage so far, or of the complete reply. The engine counts the tokens of the prediction."""
        return Usage(
            prompt_tokens=len(self._prompt_ids),
            cached_tokens=cached_tokens,
            completion_tokens=self._reply.num_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
            clamped_max_tokens=self._clamped_max_tokens,
            accepted_prediction_tokens=0 if self._request.prediction else None,
            rejected_prediction_tokens=0 if self._request.prediction else None,
        )


def _is_shown(event: ContentEvent) -> bool:
    return isinstance(event, TextDelta) and bool(event.text.strip())


class OutputParser:
    """Reads one reply. Call `feed` for every piece, then `finish` once. The events never depend on the cuts.

    `special`: the piece is the complete text of one added token of the tokenizer. `is_end`: the model ended its turn,
    so an open call is closed and its arguments become one JSON object. Otherwise a limit cut the reply, and the call
    stays open.

    Text that cannot be read as a call is emitted as text, without the tags of the model's own format unless the model
    quotes them. If ToolCallStart was already emitted, no ToolCallEnd follows. A call to a tool that is not declared is
    also emitted as text: as `{"name": …, "arguments": …}` without the tags around it, or as the model wrote it where
    it has no tags of the model's own format. It is a call, with `takes_undeclared`, if it has the model's own format.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: Calls | None,
        *,
        schemas: Schemas | None = None,
        starts_in_reasoning: bool = False,
        opening: ReasoningOpening = ReasoningOpening.ANYWHERE,
        marker_tokens: frozenset[str] = frozenset(),
        call_ids: Callable[[], str] | None = None,
        takes_undeclared: bool = False,
    ):
        """`reasoning`, `tools`: the formats of the parts that the reply has.

        `schemas`: the schemas of the declared tools. Without them, calls to all names are calls; if they are empty,
        every call is text.
        `marker_tokens`: texts that are single tokens of the tokenizer. A marker among them counts only as a special
        piece.
        `call_ids` makes ids for calls without one; by default, they have the form that the format's templates accept.
        `takes_undeclared`: a call in the format of `tools` is a call to any tool.
        """
        formats = () if tools is None else _tool_formats(tools.reads, schemas)
        if formats and reasoning is None:
            reasoning = formats[0].reasoning
        tags = tag_vocabulary(reasoning, formats, marker_tokens, has_schemas=bool(schemas))
        self.markers = tags.markers  # the tags that this parser may consume
        self._codec = tags.codec
        is_plain, is_bounded = reasoning is None and not formats, opening is not ReasoningOpening.ANYWHERE
        self._writer = ContentWriter(self._codec, is_plain=is_plain, is_bounded=is_bounded)
        self._content = self._writer.framing
        self._pending = Pending(self._codec, self._writer)
        self._reasoning = ReasoningWriter(
            reasoning, self._writer, self._codec, starts_open=starts_in_reasoning, opening=opening
        )
        self._calls = CallParser(
            tags, self._pending, self._writer, self._reasoning,
            schemas=schemas, takes_undeclared=takes_undeclared,
            call_ids=call_ids or _new_ids(formats[0].id_length if formats else None),
        )  # fmt: skip

    @property
    def in_reasoning(self) -> bool:
        """Counts depth: an opening tag inside reasoning needs its own closing tag."""
        return self._reasoning.depth > 0

    @property
    def text_spans(self) -> list[tuple[int, int]]:
        """(start, end) of each TextDelta of the last `feed` or `finish`, in characters that were fed."""
        return self._writer.spans

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self._writer.spans = []
        self._pending.text += self._codec.piece(text) if special else text
        self._advance(out)
        return out

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self._writer.spans = []
        calls, pending = self._calls, self._pending
        if self._content.follows_call and (calls.open is None or calls.open.is_blank):
            calls.open = None
            rest = pending.text.lstrip()
            if rest and any(tag.startswith(rest) for tag in self._tags.enclosing):
                pending.take(len(pending.text))  # after a call, the beginning of a tag is a tag that was cut off
        while calls.open is not None or pending.text:
            if calls.open is None:
                self._advance(out, final=True)
            elif not calls.finish(calls.open, out, is_end=is_end):
                break
        self._reasoning.finish(out, has_call=calls.open is not None)
        return out

    @property
    def _tags(self) -> TagVocabulary:
        return self._calls.tags

    def _advance(self, out: list[ContentEvent], *, final: bool = False) -> None:
        pending = self._pending
        while pending.text:
            if self._calls.open is not None:
                if not self._calls.advance(self._calls.open, out, final=final):
                    return
                continue
            end, marker = self._cut(final)
            if self._reasoning.resume(pending.text[:end]):
                pending.take(len(pending.text) - len(pending.text.lstrip()))
                continue
            self._reasoning.append(pending.take(end), out)
            if marker is None:
                if not pending.text or end == 0:
                    return
            elif not final and self._may_be_doubled(marker):
                return
            else:
                self._on_marker(marker, out)

    def _cut(self, final: bool) -> tuple[int, str | None]:
        tags, content, pending = self._tags, self._content, self._pending.text
        if self._reasoning.is_open:
            return tags.in_reasoning.cut(pending, final=final)
        in_text = tags.in_wrap if content.is_wrapped else tags.in_text
        if not content.is_at_start:
            return in_text.cut(pending, final=final)
        at_start = tags.behind_call if content.follows_call else tags.at_start
        end, marker = (in_text if content.is_wrapped else at_start).cut(pending, final=final)
        behind = len(pending) - len(pending.lstrip()) + 1
        if behind > end:
            return end, marker
        # Behind the first visible character, a tag that counts only at the start is text.
        end, marker = in_text.cut(pending[behind:], final=final)
        return behind + end, marker

    def _may_be_doubled(self, marker: str) -> bool:
        """Return whether more text is needed to decide how to read `marker`, with which the pending text begins."""
        tags, num_pending = self._tags, len(self._pending.text)
        if marker in tags.strays or marker in tags.closes:
            end = tags.end_of(marker, self._pending.text, may_grow=marker in tags.strays)
            return end is None or (not self._content.follows_call and num_pending < end + 3)
        behind = self._pending.behind(marker)
        is_near = num_pending < len(marker) + MAX_MARGIN
        return marker in tags.tagged and is_near and len(behind) < len(marker) and marker.startswith(behind)

    def _on_marker(self, marker: str, out: list[ContentEvent]) -> None:
        """Handle `marker`, with which the pending text begins."""
        tags, content, reasoning = self._tags, self._content, self._reasoning
        is_open, follows_call = reasoning.is_open, content.follows_call
        if not is_open and marker not in tags.wrap:
            self._writer.emit(content.release(), out)
        if not is_open and self._writer.quotes(marker, self._pending.text, tags):
            self._take_as_text(marker, out)
        elif follows_call and marker in tags.closes and not is_open:
            self._pending.take(len(marker))
            content.after_call()
        elif marker in tags.reasoning_opens and reasoning.may_open:
            reasoning.open(self._pending.take(len(marker)), out)
        elif marker in tags.reasoning_closes:
            reasoning.close(self._pending.take(len(marker)), out)
        elif marker in tags.wrap and marker == tags.wrap[content.is_wrapped]:
            self._pending.take(len(marker))
            content.set_wrapped(marker == tags.wrap[0])
        elif marker in tags.openings:
            self._calls.begin(tags.openings[marker], marker)
        elif (is_open and marker not in tags.drops) or not tags.is_dropped(marker, follows_call=follows_call):
            self._take_as_text(marker, out)
        else:
            tag = self._pending.take(tags.end_of(marker, self._pending.text) or 0)
            if tag != marker:
                reasoning.append(tags.without_own(tag), out)
            elif follows_call:
                content.after_call()
            elif not is_open:
                content.absorb_close()

    def _take_as_text(self, marker: str, out: list[ContentEvent]) -> None:
        self._reasoning.append(self._pending.take(len(marker)), out)


def _fills_content(request: Request, formats: ReplyFormats, *, is_opened: bool) -> bool:
    """Return whether a reply without content gets its reasoning as content. `is_opened`: the prompt opens reasoning."""
    if request.fills_content is not None:
        return request.fills_content
    return formats.reasoning is not None and formats.reasoning.fills_content and not is_opened


class CallCounter:
    """Counts tool calls, and cuts the events after the last call that the request permits."""

    def __init__(self, limit: int | None):
        """Permit `limit` calls; None or 0: any number."""
        self._limit = limit
        self.num_calls = 0  # complete calls
        self.broken: list[str] = []  # ids of calls that cannot be read
        self._open: list[str] = []

    @property
    def reached_limit(self) -> bool:
        return self._limit is not None and self.num_calls >= self._limit > 0

    @property
    def are_complete(self) -> bool:
        """Return whether there are calls, and none is open or broken."""
        return self.num_calls > 0 and not (self._open or self.broken)

    def feed(self, events: list[ContentEvent]) -> list[ContentEvent]:
        for number, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                self._open.append(event.call_id)
            elif isinstance(event, ToolCallEnd) and event.is_broken:
                self.broken.append(self._open.pop())
            elif isinstance(event, ToolCallEnd):
                self._open.pop()
                self.num_calls += 1
                if self.reached_limit:
                    return events[: number + 1]
        return events


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


def _tool_formats(own: ToolFormat, schemas: Schemas | None) -> tuple[ToolFormat, ...]:
    """Return the formats of calls that are read: the model's own, and the generic one if tools are declared."""
    if schemas is not None and not schemas:
        return (with_tags_only(own),)
    return (own,) if own.is_fallback or not schemas else (own, GENERIC)


def _new_ids(length: int | None) -> Callable[[], str]:
    if length is None:
        return new_call_id
    return lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def reply_parser(
    tokenizer: Tokenizer,
    request: Request,
    formats: ReplyFormats,
    *,
    starts_in_reasoning: bool,
    opening: ReasoningOpening = ReasoningOpening.ANYWHERE,
    schemas: Schemas | None = None,
    call_ids: Callable[[], str] | None = None,
) -> OutputParser:
    """Make the parser for one reply to the request. `schemas`: those of the declared tools; None reads them here."""
    if request.messages is None:
        return OutputParser(None, None)
    schemas = declared_schemas(request, SchemaBudget()) if schemas is None else schemas
    return OutputParser(
        formats.reasoning,
        formats.calls,
        schemas=schemas,
        starts_in_reasoning=starts_in_reasoning,
        opening=opening,
        marker_tokens=tokenizer.marker_tokens,
        call_ids=call_ids,
        takes_undeclared=formats.takes_undeclared and bool(schemas),  # a client without tools can run no call
    )


def _opening(constraint: Constraint | None) -> ReasoningOpening:
    """Return the places where reasoning may open: with a grammar, only where the engine allows it."""
    if constraint is None or constraint.matcher is None or constraint.reasoning is None:
        return ReasoningOpening.ANYWHERE
    rule = constraint.reasoning
    return ReasoningOpening.AT_START if rule.is_open or rule.may_open else ReasoningOpening.NEVER


def declared_schemas(request: Request, budget: SchemaBudget) -> Schemas:
    """Return the schemas of the tools that a reply may call.

    Raises InvalidParameter, naming the tool, when the budget is spent.
    """
    if request.messages is None or request.tool_choice.mode == "none":
        return {}
    declared = (*request.tools, *request.unlisted_tools)
    return read_schemas(((tool.name, tool.parameters, tool.param) for tool in declared), budget)
