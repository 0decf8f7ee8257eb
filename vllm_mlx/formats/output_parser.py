"""The parser of one reply: reasoning and tool calls between tags. Knows no family: formats and bodies are given."""

from collections.abc import Callable

from ..core.events import ContentEvent, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from .bodies import BodyContext, BodyStatus, Schemas
from .content_writer import ContentWriter
from .family import Opening, ReasoningFormat, ReasoningOpening, ToolFormat
from .framing import ReasoningFraming
from .open_call import CallIds, OpenCall, new_call_id
from .vocabulary import tag_vocabulary

_MAX_MARGIN = 256  # characters in which a marker may follow itself


class OutputParser:
    """Reads one reply. Call `feed` for every piece, then `finish` once. The events never depend on the cuts.

    `special`: the piece is the complete text of one added token of the tokenizer. `is_end`: the model ended its turn,
    so an open call is closed and its arguments become one JSON object. Otherwise a limit cut the reply, and the call
    stays open.

    Text that cannot be read as a call is emitted as text, without the tags of the model's own format unless the model
    quotes them. If ToolCallStart was already emitted, no ToolCallEnd follows. A call to a tool that is not declared is
    emitted as text, too: `{"name": …, "arguments": …}` in place of the tags around it, or as the model wrote it where
    it has no tags of the model's own format. It is a call, with `takes_undeclared`, if it has the model's own format.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: tuple[ToolFormat, ...],
        *,
        schemas: Schemas | None = None,  # schemas of the declared tools; None: every call is one
        tokens: frozenset[str] = frozenset(),  # the tokenizer's; tags among them count only as special pieces
        starts_in_reasoning: bool = False,
        opening: ReasoningOpening = ReasoningOpening.ANYWHERE,
        call_ids: Callable[[], str] = new_call_id,
        takes_undeclared: bool = False,  # a call in the model's own format is a call to any tool
    ):
        self._takes_undeclared = takes_undeclared
        self._tags = tag_vocabulary(reasoning, tools, tokens, has_schemas=bool(schemas))
        self._codec = self._tags.codec
        self.markers = self._tags.markers  # the tags that this parser may consume
        self._schemas = schemas
        self._ids = CallIds(call_ids)
        self._pending = ""  # fed, but may still become a marker
        is_plain, is_bounded = reasoning is None and not tools, opening is not ReasoningOpening.ANYWHERE
        self._writer = ContentWriter(self._codec, is_plain=is_plain, is_bounded=is_bounded)
        self._content = self._writer.framing
        self._reasoning = ReasoningFraming()
        self._has_messages = reasoning is not None and reasoning.headed is not None
        self._call: OpenCall | None = None
        self._num_calls = 0
        self._shows_reasoning = reasoning is not None and reasoning.is_shown
        self._is_reasoning = reasoning is not None and (starts_in_reasoning or reasoning.is_implied)
        self._unshown_tag = reasoning.opens[0] if reasoning and self._shows_reasoning and self._is_reasoning else ""
        self._depth = int(self._is_reasoning)
        self._opening = opening

    @property
    def in_reasoning(self) -> bool:
        """Counts depth: an opening tag inside reasoning needs a closing tag of its own."""
        return self._depth > 0

    @property
    def text_spans(self) -> list[tuple[int, int]]:
        """(start, end) of each TextDelta of the last `feed` or `finish`, in characters that were fed."""
        return self._writer.spans

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self._writer.spans = []
        self._pending += self._codec.piece(text) if special else text
        self._advance(out)
        return out

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]:
        out: list[ContentEvent] = []
        self._writer.spans = []
        if self._content.follows_call and (self._call is None or self._call.is_blank):
            self._call = None
            rest = self._pending.lstrip()
            if rest and any(tag.startswith(rest) for tag in self._tags.enclosing):
                self._take(len(self._pending))  # after a call, the beginning of a tag is a tag that was cut off
        while self._call is not None or self._pending:
            if self._call is None:
                self._advance(out, final=True)
            elif self._call.body.ends_with_reply and self._pending:
                self._advance_call(self._call, out, final=True)
            elif self._call.is_started or self._call.described is not None:
                self._finish_call(self._call, out, is_end)
                break
            else:
                self._take_text(self._call, len(self._pending), out)
                self._emit_as_text(self._call, out)
        if self._is_reasoning and not self._shows_reasoning:
            self._append_reasoning(self._reasoning.finish(), out)
        elif self._call is None:
            self._writer.emit(self._content.finish(), out)
        return out

    def _finish_call(self, call: OpenCall, out: list[ContentEvent], is_end: bool) -> None:
        if is_end:
            call.body.end()
        else:
            call.body.cut(self._pending)
        self._sync(call, out)
        if is_end:
            self._end_call(call, out)
        elif call.described is not None and not call.has_head:
            self._writer.feed_made(call.description("{"), out)

    # Text and markers

    def _advance(self, out: list[ContentEvent], *, final: bool = False) -> None:
        while self._pending:
            if self._call is not None:
                if not self._advance_call(self._call, out, final):
                    return
                continue
            end, marker = self._cut(final)
            self._append(self._take(end), out)
            if marker is None:
                if not self._pending or end == 0:
                    return
            elif not final and self._may_be_doubled(marker):
                return
            else:
                self._on_marker(marker, out)

    def _cut(self, final: bool) -> tuple[int, str | None]:
        tags, content, pending = self._tags, self._content, self._pending
        if self._is_reasoning:
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
        """Whether more text is needed to decide how to read `marker`, with which the pending text begins."""
        tags = self._tags
        if marker in tags.strays or marker in tags.closes:
            return not self._content.follows_call and len(self._pending) < len(marker) + 2
        behind = self._behind(marker)
        is_near = len(self._pending) < len(marker) + _MAX_MARGIN
        return marker in tags.tagged and is_near and len(behind) < len(marker) and marker.startswith(behind)

    def _behind(self, marker: str) -> str:
        """Return the text behind `marker`, without white space, in which the same marker may follow."""
        return self._pending[len(marker) : len(marker) + _MAX_MARGIN].lstrip()

    def _take(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        self._writer.position += self._codec.num_chars(text)
        return text

    def _append(self, text: str, out: list[ContentEvent]) -> None:
        if not self._is_reasoning:
            self._writer.feed(text, out)
        elif self._shows_reasoning:
            self._append_shown(text, out)
        else:
            self._append_reasoning(self._reasoning.feed(text), out)

    def _append_reasoning(self, text: str, out: list[ContentEvent]) -> None:
        if text:
            out.append(ReasoningDelta(self._codec.decode(text)))

    def _append_shown(self, text: str, out: list[ContentEvent]) -> None:
        if text:
            if self._unshown_tag:
                self._writer.emit_extra(self._unshown_tag, out)
            self._unshown_tag = ""
            self._writer.emit(text, out)

    def _on_marker(self, marker: str, out: list[ContentEvent]) -> None:
        """Handle `marker`, with which the pending text begins."""
        tags = self._tags
        if not self._is_reasoning and marker not in tags.wrap:
            self._writer.emit(self._content.release(), out)
        follows_call = self._content.follows_call
        if not self._is_reasoning and self._writer.quotes(marker, self._pending[len(marker) :], tags):
            self._append(self._take(len(marker)), out)
        elif follows_call and marker in tags.closes and not self._is_reasoning:
            self._take(len(marker))
            self._content.after_call()
        elif marker in tags.reasoning_opens and self._may_open:
            text = self._take(len(marker))
            self._show_tag(text, out)
            is_once = self._opening is not ReasoningOpening.ANYWHERE
            if not (self._is_reasoning and (self._reasoning.is_blank or is_once)):
                self._depth += 1
            self._is_reasoning = True
        elif marker in tags.reasoning_closes:
            text = self._take(len(marker))
            if self._is_reasoning:
                self._show_tag(text, out)
            self._depth = max(0, self._depth - 1)
            self._end_reasoning()
        elif marker in tags.wrap and marker == tags.wrap[self._content.is_wrapped]:
            self._take(len(marker))
            if marker == tags.wrap[0]:
                self._content.open_wrap()
            else:
                self._content.close_wrap()
        elif marker in tags.openings:
            self._open_call(tags.openings[marker], marker)
        elif self._is_reasoning and marker not in tags.drops:
            self._append(self._take(len(marker)), out)
        elif tags.is_dropped(marker, follows_call=follows_call):
            self._take(len(marker))
            if follows_call:
                self._content.after_call()
            elif not self._is_reasoning:
                self._content.absorb_close()
        else:
            self._append(self._take(len(marker)), out)

    @property
    def _may_open(self) -> bool:
        """Whether an opening tag counts here. Inside reasoning it does, but it does not open reasoning twice."""
        if self._is_reasoning or self._opening is ReasoningOpening.ANYWHERE:
            return True
        return self._opening is ReasoningOpening.AT_START and self._content.is_at_start

    def _show_tag(self, tag: str, out: list[ContentEvent]) -> None:
        if self._shows_reasoning:
            self._unshown_tag = ""
            self._writer.emit(tag, out)

    def _end_reasoning(self) -> None:
        if self._opening is ReasoningOpening.AT_START:
            self._opening = ReasoningOpening.NEVER
        if self._is_reasoning:
            self._is_reasoning = False
            self._reasoning.close()
            if not self._shows_reasoning:
                self._content.after_reasoning()
        else:
            self._content.absorb_close()

    # Calls

    def _open_call(self, opening: Opening, marker: str) -> None:
        tags, is_native = self._tags, marker in self._tags.native
        if marker in tags.tagged and self._behind(marker).startswith(marker):
            self._take(self._pending.index(marker, len(marker)))  # the same tag follows, which opens the call
            return
        context = BodyContext(self._schemas or {}, tags.enclosing, tags.may_call, self._codec.encode)
        is_quoted = is_native and not self._is_reasoning and self._writer.is_quoted(marker)
        self._call = OpenCall(opening.new_body(context), opening, marker, is_native=is_native, is_quoted=is_quoted)
        if not opening.keeps_marker:
            self._call.raw.append(self._take(len(marker)))

    def _advance_call(self, call: OpenCall, out: list[ContentEvent], final: bool) -> bool:
        """Return whether more of the pending text may be read now."""
        end, marker = call.end_in(self._pending, self._tags, final=final)
        text = self._pending if end == len(self._pending) else self._pending[:end]
        is_end = final or marker is not None
        self._take_text(call, call.consume(text, final=is_end), out)
        self._sync(call, out)
        match call.body.status:
            case BodyStatus.OPEN | BodyStatus.WAITING:
                if marker is None:
                    return False
                self._close_call(call, out)
            case BodyStatus.DONE:
                self._end_call(call, out)
                if call.body.follow is not None:
                    self._call = call.following(call.body.follow())
            case BodyStatus.REASONING | BodyStatus.TEXT as kind if not call.is_quoted:
                self._begin_message(is_reasoning=kind is BodyStatus.REASONING)
            case BodyStatus.FAILED | BodyStatus.REASONING | BodyStatus.TEXT:
                self._emit_as_text(call, out)
            case BodyStatus.STUCK:
                return self._end_at_tag(call, out, final)
            case BodyStatus.ENDED:
                self._call = None
                if call.is_plain_block and not (self._is_reasoning or self._content.follows_call):
                    self._writer.hold("".join(call.raw))
                elif not call.has_tags or self._is_reasoning:
                    self._append("" if self._content.follows_call else "".join(call.raw), out)
                elif not self._content.follows_call:
                    self._content.absorb_close()
        return True

    def _end_at_tag(self, call: OpenCall, out: list[ContentEvent], final: bool) -> bool:
        """Go on where the body cannot continue: at a tag around it, or because this is no call."""
        end, marker = self._tags.in_call.cut(self._pending, final=final)
        if end == 0 and marker is None and self._pending:
            return False
        if end == 0 and marker is not None:
            self._close_call(call, out)
        else:
            self._emit_as_text(call, out)
        return True

    def _take_text(self, call: OpenCall, num_chars: int, out: list[ContentEvent]) -> None:
        text = self._take(num_chars)
        if text:
            call.is_at_own_marker = False
        if call.is_refused:
            self._append(text, out)
        else:
            call.raw.append(text)

    def _sync(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Emit the part of the call that the body has read."""
        name = call.body.name
        if name is not None and not call.is_named:
            name = self._codec.decode(name)
            is_taken = self._takes_undeclared and call.marker in self._tags.native
            if is_taken or self._schemas is None or name in self._schemas:
                self._start_call(call, name, out)
            elif call.has_tags and not self._is_reasoning:
                call.described = name
            else:
                call.is_refused = True
                self._append("".join(call.raw), out)
        if not (call.is_started or call.described is not None):
            return
        arguments = self._codec.decode_json(call.body.take_arguments())
        if call.described is not None:
            if arguments and not call.has_head:
                self._writer.begin_line(out)
            self._writer.feed_made(call.description(arguments), out)
        elif arguments:
            out.append(ToolCallDelta(self._num_calls - 1, arguments))

    def _start_call(self, call: OpenCall, name: str, out: list[ContentEvent]) -> None:
        if call.marker in self._tags.native:
            self._tags = self._tags.without_fallback
        call.is_started = True
        self._is_reasoning = False
        self._depth = 0
        self._reasoning.close()
        self._content.after_call()
        out.append(ToolCallStart(self._num_calls, self._codec.decode(self._ids.take(call.body.call_id)), name))
        self._num_calls += 1

    def _end_call(self, call: OpenCall, out: list[ContentEvent]) -> None:
        self._call = None
        if call.is_started:
            out.append(ToolCallEnd(self._num_calls - 1))
        elif call.described is not None:
            self._writer.feed_made("}", out)
            self._content.after_call()

    def _begin_message(self, *, is_reasoning: bool) -> None:
        self._call = None
        if is_reasoning:
            self._is_reasoning = True
            self._depth = 1
            if self._reasoning.is_blank:
                self._reasoning.close()
        else:
            self._depth = 0
            self._end_reasoning()
            self._writer.begins_message = self._has_messages

    def _close_call(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """End the call at the tag that begins here."""
        is_complete = call.body.close()
        self._sync(call, out)
        if is_complete and (call.is_started or call.described is not None):
            self._end_call(call, out)
        else:
            self._emit_as_text(call, out)

    def _emit_as_text(self, call: OpenCall, out: list[ContentEvent]) -> None:
        """Emit the text of a call that proved to be none."""
        self._call = None
        if call.has_head:
            call.body.cut("")
            self._writer.feed_made(self._codec.decode_json(call.body.take_arguments()), out)
        elif not call.is_refused:
            if call.is_at_own_marker:
                call.raw.append(self._take(len(call.marker) if call.has_tags else 1))
            raw = "".join(call.raw)
            behind = f"{raw}{self._pending[: len(call.marker) + 2]}"[len(call.marker) :]
            is_mentioned = not call.is_named and self._writer.is_mentioned(behind, self._codec.num_chars(raw))
            if call.is_further:
                self._append(self._tags.without_own(raw), out)
            elif not call.has_tags or self._is_reasoning or is_mentioned:
                self._writer.has_quoted |= not self._is_reasoning
                self._append(raw, out)
            elif text := self._tags.shown(raw, call.marker):
                self._writer.feed_made(text, out)
            else:
                self._content.absorb_close()
