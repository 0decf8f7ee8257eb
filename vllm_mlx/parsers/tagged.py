"""Thoughts and tool calls between tags, in one machine. Knows no family: formats and bodies are given."""

import secrets
from collections.abc import Callable

from ..core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from .bodies import BodyStatus, Schemas, ToolBody
from .formats import ReasoningFormat, ToolFormat
from .framing import ContentFraming, ReasoningFraming
from .splitter import MarkerSplitter


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Call:
    """A tool call that is being read."""

    def __init__(self, body: ToolBody):
        self.body = body
        self.raw: list[str] = []  # its text so far, tags included
        self.is_started = False
        self.is_refused = False  # the tool is not declared: the call is text, read on only to find its end


class TaggedParser:
    """`token_markers` count only as special pieces, all other markers as text.

    What cannot be read as a call, and a call to a tool that is not declared, is given as the text it was. Where that
    shows after the call was announced, the call is left without its end.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        *,
        schemas: Schemas | None = None,  # of the declared tools; None: any tool will do
        token_markers: frozenset[str] | None = None,  # None: none, until one comes as a special piece
        starts_in_reasoning: bool = False,
        call_ids: Callable[[], str] = new_call_id,
    ):
        self.text_starts: list[int] = []
        self._reasoning = reasoning
        self._tools = tools
        self._schemas = schemas
        self._call_ids = call_ids
        self._learns_tokens = token_markers is None
        self._tokens = self.markers & (token_markers or frozenset())
        self._pending = ""  # fed, and may still become a marker
        self._position = 0  # of `_pending`, in characters fed
        self._content = ContentFraming()
        self._thought = ReasoningFraming()
        self._call: _Call | None = None
        self._num_calls = 0
        self._is_thinking = reasoning is not None and (starts_in_reasoning or reasoning.is_implied)
        self._depth = int(self._is_thinking)
        self._set_splitters()

    @property
    def markers(self) -> frozenset[str]:
        formats = (self._reasoning, self._tools)
        return frozenset(tag for format in formats if format is not None for tag in (format.open, format.close))

    @property
    def in_reasoning(self) -> bool:
        """By depth: an opening tag inside a thought needs a closing tag of its own."""
        return self._depth > 0

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self.text_starts = []
        if special and self._is_token(text):
            self._feed_marker(text, out)
        else:
            self._pending += text
            self._advance(out)
        return out

    def finish(self) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self.text_starts = []
        call = self._call
        if call is not None and call.is_started:
            call.body.cut(self._pending)
            self._sync(call, out)
            return out
        if call is not None:
            self._book(call, len(self._pending), out)
            self._give_back(call, out)
        self._advance(out, final=True)
        if self._is_thinking:
            self._append_reasoning(self._thought.finish(), out)
        else:
            self._append_text(self._content.finish(), out)
        return out

    # Text and markers

    def _set_splitters(self) -> None:
        reasoning, tools = self._reasoning, self._tools
        thoughts = [reasoning.open, reasoning.close] if reasoning else []
        calls = [tools.open] if tools else []
        ends = [tools.close] if tools else []
        bare = [tools.bare_open] if tools and tools.bare_open and self._schemas else []
        self._in_thought = MarkerSplitter(self._as_text(thoughts + calls))
        self._in_text = MarkerSplitter(self._as_text(thoughts + calls + ends + bare))
        self._in_call = MarkerSplitter(self._as_text(calls + ends))

    def _as_text(self, markers: list[str]) -> list[str]:
        return [marker for marker in markers if marker not in self._tokens]

    def _is_token(self, text: str) -> bool:
        if self._learns_tokens and text in self.markers - self._tokens:
            for format in (self._reasoning, self._tools):
                if format is not None and text in (format.open, format.close):
                    self._tokens |= {format.open, format.close}
            self._set_splitters()
        return text in self._tokens

    def _feed_marker(self, marker: str, out: list[ContentEvent]) -> None:
        self._advance(out, final=True)
        call = self._call
        if call is not None and self._tools is not None and marker not in (self._tools.open, self._tools.close):
            if call.is_started or call.is_refused:  # a tag of thoughts inside arguments is data
                self._pending += marker
                self._advance(out)
                return
            self._give_back(call, out)
        self._pending += marker
        self._on_marker(marker, out)

    def _advance(self, out: list[ContentEvent], *, final: bool = False) -> None:
        while self._pending:
            if self._call is not None:
                if not self._advance_call(self._call, out, final):
                    return
                continue
            splitter = self._in_thought if self._is_thinking else self._in_text
            end, marker = splitter.cut(self._pending, final=final)
            self._append(self._take(end), out)
            if marker is None:
                return
            self._on_marker(marker, out)

    def _take(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        self._position += num_chars
        return text

    def _append(self, text: str, out: list[ContentEvent]) -> None:
        if self._is_thinking:
            self._append_reasoning(self._thought.feed(text), out)
        else:
            self._append_text(self._content.feed(text), out)

    def _append_text(self, text: str, out: list[ContentEvent]) -> None:
        if text:
            self.text_starts.append(self._position - len(text))
            out.append(TextDelta(text))

    def _append_reasoning(self, text: str, out: list[ContentEvent]) -> None:
        if text:
            out.append(ReasoningDelta(text))

    def _on_marker(self, marker: str, out: list[ContentEvent]) -> None:
        """`marker` stands at the start of what is pending."""
        reasoning, tools = self._reasoning, self._tools
        if self._call is not None:
            self._end_call_at(self._call, marker, out)
        elif reasoning is not None and marker == reasoning.open:
            self._take(len(marker))
            if not (self._is_thinking and self._thought.is_blank):
                self._depth += 1
            self._is_thinking = True
        elif reasoning is not None and marker == reasoning.close:
            self._take(len(marker))
            self._depth = max(0, self._depth - 1)
            self._end_thought()
        elif tools is not None and marker == tools.close:
            text = self._take(len(marker))
            if self._content.follows_call and not self._is_thinking:
                self._content.after_call()
            else:
                self._append(text, out)
        else:
            self._open_call(marker)

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._thought.close()
            self._content.after_reasoning()
        else:
            self._content.absorb_close()

    # Calls

    def _open_call(self, marker: str) -> None:
        assert self._tools is not None
        enclosing = self._as_text([self._tools.close, self._tools.open])
        self._call = _Call(self._tools.new_body(self._schemas or {}, tuple(enclosing)))
        if marker == self._tools.open:
            self._call.raw.append(self._take(len(marker)))

    def _advance_call(self, call: _Call, out: list[ContentEvent], final: bool) -> bool:
        """Returns whether there may be more to do with what is pending."""
        self._book(call, call.body.consume(self._pending, final=final), out)
        self._sync(call, out)
        match call.body.status:
            case BodyStatus.OPEN:
                return False
            case BodyStatus.DONE:
                self._end_call(call, out)
            case BodyStatus.FAILED:
                self._give_back(call, out)
            case BodyStatus.STUCK:
                end, marker = self._in_call.cut(self._pending, final=final)
                if end == 0 and marker is None:
                    return False
                if end == 0 and marker is not None:
                    self._end_call_at(call, marker, out)
                else:
                    self._give_back(call, out)
        return True

    def _book(self, call: _Call, num_chars: int, out: list[ContentEvent]) -> None:
        text = self._take(num_chars)
        if call.is_refused:
            self._append(text, out)
        else:
            call.raw.append(text)

    def _sync(self, call: _Call, out: list[ContentEvent]) -> None:
        """Pass on what the body has read."""
        name = call.body.name
        if name is not None and not (call.is_started or call.is_refused):
            if self._schemas is None or name in self._schemas:
                self._start_call(call, name, out)
            else:
                call.is_refused = True
                self._append("".join(call.raw), out)
        if call.is_started and (arguments := call.body.take_arguments()):
            out.append(ToolCallDelta(self._num_calls - 1, arguments))

    def _start_call(self, call: _Call, name: str, out: list[ContentEvent]) -> None:
        call.is_started = True
        self._is_thinking = False
        self._depth = 0
        self._thought.close()
        self._content.after_call()
        out.append(ToolCallStart(self._num_calls, self._call_ids(), name))
        self._num_calls += 1

    def _end_call(self, call: _Call, out: list[ContentEvent]) -> None:
        self._call = None
        if call.is_started:
            out.append(ToolCallEnd(self._num_calls - 1))

    def _end_call_at(self, call: _Call, marker: str, out: list[ContentEvent]) -> None:
        assert self._tools is not None
        is_complete = call.body.close()
        self._sync(call, out)
        if is_complete and call.is_started:
            self._end_call(call, out)
        else:
            self._give_back(call, out)
        if marker == self._tools.open:
            self._open_call(marker)
        else:
            text = self._take(len(marker))
            if not (is_complete and call.is_started):
                self._append(text, out)

    def _give_back(self, call: _Call, out: list[ContentEvent]) -> None:
        """It is no call: its text goes where it was written."""
        self._call = None
        if not call.is_refused:
            self._append("".join(call.raw), out)
