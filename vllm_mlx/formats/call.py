"""Turns the text of a call into a call, into a description of it if its tool is not declared, or into text."""

import json
import secrets
from collections.abc import Callable

from ..core.events import ContentEvent, ToolCallDelta, ToolCallEnd, ToolCallStart
from .bodies import Body, BodyContext, BodyStatus, Schemas
from .content import ContentWriter, Pending
from .family import Opening, Place
from .reasoning import ReasoningWriter
from .vocabulary import TagVocabulary


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OpenCall:
    """`marker` is the tag that began it, in the form in which the parser found it."""

    def __init__(self, body: Body, opening: Opening, marker: str, *, is_native: bool, is_quoted: bool):
        """`is_native`: the tag belongs to the model's own format. `is_quoted`: the reply writes about the tag."""
        self.body = body
        self.opening = opening
        self.marker = marker
        self.raw: list[str] = []  # the text read so far, tags included
        self.is_at_own_marker = opening.keeps_marker  # the body still has to read the tag that began the call
        self.name: str | None = None  # of a declared tool; the call starts as soon as its arguments do
        self.is_started = False
        self.is_refused = False  # the tool is not declared: the call is text, read only to find where it ends
        self.has_tags = is_native and not is_quoted and opening.place is Place.ANYWHERE
        """True for a call in tags of the model's own format, none of which may be shown."""
        self.is_plain_block = is_native and not is_quoted and opening.place is Place.OUTSIDE_REASONING
        """True for a block of calls in plain text, such as a list. An empty block that is the only content is text."""
        self.is_further = False  # it follows another call in a list, without a tag before it
        self.is_quoted = is_quoted
        self.described: str | None = None  # the name of a tool that is not declared: the call is shown as JSON
        self.has_head = False  # the start of that JSON was shown

    @property
    def is_named(self) -> bool:
        return self.name is not None or self.described is not None or self.is_refused

    @property
    def is_shown(self) -> bool:
        """Return whether parts of the call are emitted while it is read: as a call, or as its description."""
        return self.is_started or self.described is not None

    @property
    def is_blank(self) -> bool:
        return not self.is_started and not any(text.strip() for text in self.raw)

    def consume(self, text: str, *, final: bool) -> int:
        """Read text and return how many characters were read. A body may choose another one, which then continues."""
        end = self.body.consume(text, final=final)
        while self.body.chosen is not None:
            self.body = self.body.chosen
            end += self.body.consume(text[end:], final=final)
        return end

    def end_in(self, text: str, tags: TagVocabulary, *, final: bool) -> tuple[int, str | None]:
        """Return the end of the text that is the call's, and the token that ends the call in any state of its body."""
        splitter = tags.ends_call if self.is_named else tags.ends_unnamed_call
        if splitter is None or self.body.reads_tags or self.is_at_own_marker:
            return len(text), None
        return splitter.cut(text, final=final)

    def following(self, body: Body) -> "OpenCall":
        """Return the next call of a list of calls, which no tag begins."""
        call = OpenCall(body, self.opening, self.marker, is_native=False, is_quoted=False)
        call.is_at_own_marker = False
        call.is_further = True
        call.has_tags = self.has_tags
        return call

    def description(self, arguments: str) -> str:
        """Return the next part of the JSON that shows a call of an undeclared tool. `arguments`: JSON text read now."""
        if self.has_head:
            return arguments
        self.has_head = True
        return f'{{"name": {json.dumps(self.described, ensure_ascii=False)}, "arguments": {arguments}'


class CallParser:
    """Reads the calls of one reply, one after another. `open` is the call that is being read."""

    def __init__(
        self,
        tags: TagVocabulary,
        pending: Pending,
        writer: ContentWriter,
        reasoning: ReasoningWriter,
        *,
        schemas: Schemas | None,
        call_ids: Callable[[], str],
        takes_undeclared: bool,
    ):
        self.tags = tags
        self.open: OpenCall | None = None
        self._pending = pending
        self._writer = writer
        self._content = writer.framing
        self._reasoning = reasoning
        self._schemas = schemas
        self._new_id = call_ids
        self._used_ids: set[str] = set()  # an id that the model wrote is used once
        self._takes_undeclared = takes_undeclared
        self._num_calls = 0

    def begin(self, opening: Opening, marker: str) -> None:
        """Begin a call with `marker`, with which the pending text begins."""
        tags, is_native = self.tags, marker in self.tags.native
        if marker in tags.tagged and self._pending.behind(marker).startswith(marker):
            self._pending.take(self._pending.text.index(marker, len(marker)))
            return  # the same tag follows, and opens the call
        context = BodyContext(self._schemas or {}, tags.enclosing, tags.may_call, tags.codec.encode)
        is_quoted = is_native and not self._reasoning.is_open and self._writer.is_quoted(marker)
        self.open = OpenCall(opening.new_body(context), opening, marker, is_native=is_native, is_quoted=is_quoted)
        if not opening.keeps_marker:
            self.open.raw.append(self._pending.take(len(marker)))

    def advance(self, call: OpenCall, out: list[ContentEvent], *, final: bool) -> bool:
        """Read on in the open call. Returns whether more of the pending text may be read now."""
        pending = self._pending.text
        end, marker = call.end_in(pending, self.tags, final=final)
        text = pending if end == len(pending) else pending[:end]
        is_end = final or marker is not None
        self._take_text(call, call.consume(text, final=is_end), out)
        self._sync(call, out)
        match call.body.status:
            case BodyStatus.OPEN | BodyStatus.WAITING:
                if marker is None:
                    return False
                self._close(call, out)
            case BodyStatus.DONE:
                self._end(call, out)
                if call.body.follow is not None:
                    self.open = call.following(call.body.follow())
            case BodyStatus.REASONING | BodyStatus.TEXT | BodyStatus.NOTHING as kind if not call.is_quoted:
                self.open = None
                self._reasoning.begin_message(
                    is_reasoning=kind is not BodyStatus.TEXT, is_dropped=kind is BodyStatus.NOTHING
                )
            case BodyStatus.FAILED | BodyStatus.REASONING | BodyStatus.TEXT | BodyStatus.NOTHING:
                self._emit_as_text(call, out)
            case BodyStatus.STUCK:
                return self._end_at_tag(call, out, final)
            case BodyStatus.ENDED:
                self._end_list(call, out)
        return True

    def finish(self, call: OpenCall, out: list[ContentEvent], *, is_end: bool) -> bool:
        """Continue the open call where the reply ends. Returns whether more of the pending text is to be read."""
        if call.body.ends_with_reply and self._pending.text:
            self.advance(call, out, final=True)
        elif not call.is_shown:
            self._take_text(call, len(self._pending.text), out)
            self._emit_as_text(call, out)
        elif is_end:
            self._end_early(call, out)
        else:
            self._cut(call, out)
            return False
        return True

    def _end_early(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """End a call that the model did not close. If its arguments were still open, they cannot be used."""
        is_whole = call.body.end()
        self._sync(call, out)
        if is_whole or not call.is_started:
            self._pending.take(len(self._pending.text))
            self._end(call, out)
        else:
            self._take_text(call, len(self._pending.text), out)
            self._break(call, out)

    def _cut(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Leave the call open where a limit cut the reply. Its arguments are then not JSON."""
        call.body.cut(self._pending.text)
        self._sync(call, out)
        if call.described is not None and not call.has_head:
            self._show(call, "{", out)

    def _break(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Take a call back whose arguments were closed as JSON but cannot be used: its text becomes content."""
        self.open = None
        out.append(ToolCallEnd(self._num_calls - 1, is_broken=True))
        self._emit_raw(call, "".join(call.raw), out)

    def _end_list(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """End a list of calls in which no call, or no further call, was found."""
        self.open = None
        if call.is_plain_block and not (self._reasoning.is_open or self._content.follows_call):
            self._writer.hold("".join(call.raw))
        elif not call.has_tags or self._reasoning.is_open:
            self._reasoning.append("" if self._content.follows_call else "".join(call.raw), out)
        elif not self._content.follows_call:
            self._content.absorb_close()

    def _end_at_tag(self, call: OpenCall, out: list[ContentEvent], final: bool) -> bool:
        """Continue where the body cannot: at a tag around it, or because this is not a call."""
        end, marker = self.tags.in_call.cut(self._pending.text, final=final)
        if end == 0 and marker is None and self._pending.text:
            return False
        if end == 0 and marker is not None:
            self._close(call, out)
        else:
            self._emit_as_text(call, out)
        return True

    def _take_text(self, call: OpenCall, num_chars: int, out: list[ContentEvent]) -> None:
        text = self._pending.take(num_chars)
        if text:
            call.is_at_own_marker = False
        if call.is_refused:
            self._reasoning.append(text, out)
        else:
            call.raw.append(text)

    def _sync(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Emit the part of the call that the body has read."""
        codec = self.tags.codec
        if call.body.name is not None and not call.is_named:
            self._name(call, codec.decode(call.body.name), out)
        if call.name is not None and not call.is_started and call.body.has_begun:
            self._start(call, call.name, out)
        if not call.is_shown:
            return
        if arguments := codec.decode_json(call.body.take_arguments()):
            self._show(call, arguments, out)

    def _show(self, call: OpenCall, arguments: str, out: list[ContentEvent]) -> None:
        """Emit the next part of the arguments, which is never empty."""
        if call.described is None:
            out.append(ToolCallDelta(self._num_calls - 1, arguments))
            return
        if not call.has_head:
            self._writer.begin_line(out)
        self._writer.feed_made(call.description(arguments), out)

    def _name(self, call: OpenCall, name: str, out: list[ContentEvent]) -> None:
        """Decide the result by the name of the call."""
        is_taken = self._takes_undeclared and call.marker in self.tags.native
        if is_taken or self._schemas is None or name in self._schemas:
            call.name = name
        elif call.has_tags and not (self._reasoning.is_open or self._is_mentioned(call, "")):
            call.described = name
        else:
            self._writer.has_quoted |= call.has_tags and not self._reasoning.is_open
            call.is_refused = True
            self._reasoning.append("".join(call.raw), out)

    def _start(self, call: OpenCall, name: str, out: list[ContentEvent]) -> None:
        written = call.body.call_id
        call_id = self._new_id() if written is None or written in self._used_ids else written
        self._used_ids.add(call_id)
        if call.marker in self.tags.native:
            self.tags = self.tags.without_fallback
        call.is_started = True
        self._reasoning.stop()
        self._content.after_call()
        out.append(ToolCallStart(self._num_calls, self.tags.codec.decode(call_id), name))
        self._num_calls += 1

    def _end(self, call: OpenCall, out: list[ContentEvent]) -> None:
        self.open = None
        if call.is_started:
            out.append(ToolCallEnd(self._num_calls - 1))
        elif call.described is not None:
            self._writer.feed_made("}", out)
            self._content.after_call()

    def _close(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """End the call at the tag that begins here."""
        is_complete = call.body.close()
        self._sync(call, out)
        if is_complete and call.is_shown:
            self._end(call, out)
        else:
            self._emit_as_text(call, out)

    def _emit_as_text(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Emit text that turned out not to be a call, or end a call that was read before the text went wrong."""
        self.open = None
        if call.is_started and call.body.is_whole:
            self._end(call, out)
        elif call.is_started:
            call.body.end()
            self._sync(call, out)
            self._break(call, out)
        elif call.has_head:
            call.body.cut("")
            self._writer.feed_made(self.tags.codec.decode_json(call.body.take_arguments()), out)
        elif not call.is_refused:
            if call.is_at_own_marker:
                call.raw.append(self._pending.take(len(call.marker) if call.has_tags else 1))
            self._emit_raw(call, "".join(call.raw), out)

    def _is_mentioned(self, call: OpenCall, following: str) -> bool:
        """Return whether the reply writes about the tag that began the call, with `following` after the read text."""
        raw = "".join(call.raw)
        text = raw + following
        behind = text[self.tags.end_of(call.marker, text) :]
        return self._writer.is_mentioned(behind, self.tags.codec.num_chars(raw))

    def _emit_raw(self, call: OpenCall, raw: str, out: list[ContentEvent]) -> None:
        following = self._pending.text[: len(call.marker) + 3]
        is_mentioned = not (call.is_started or call.has_head) and self._is_mentioned(call, following)
        if call.is_further:
            self._reasoning.append(self.tags.without_own(raw), out)
        elif not call.has_tags or self._reasoning.is_open or is_mentioned:
            self._writer.has_quoted |= not self._reasoning.is_open
            self._reasoning.append(raw, out)
        elif text := self.tags.shown(raw, call.marker):
            self._writer.feed_made(text.lstrip("\n"), out)
        elif following[:1].isalnum() and raw[len(call.marker) :].strip() and not call.opening.keeps_marker:
            self._pending.put_back(raw[len(call.marker) :])  # the punctuation belongs to a text
        else:
            self._content.absorb_close()
