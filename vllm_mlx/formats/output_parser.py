"""The parser of one reply finds its tags. It knows no family: formats and bodies are given."""

from collections.abc import Callable

from ..core.events import ContentEvent
from .bodies import Schemas
from .call import CallParser, new_call_id
from .content import MAX_MARGIN, ContentWriter, Pending
from .family import ReasoningFormat, ReasoningOpening, ToolFormat
from .reasoning import ReasoningWriter
from .vocabulary import TagVocabulary, tag_vocabulary


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
        schemas: Schemas | None = None,  # the declared tools; without them, every call counts
        tokens: frozenset[str] = frozenset(),  # the tokenizer's; tags among them count only as special pieces
        starts_in_reasoning: bool = False,
        opening: ReasoningOpening = ReasoningOpening.ANYWHERE,
        call_ids: Callable[[], str] = new_call_id,
        takes_undeclared: bool = False,  # a call in the model's own format is a call to any tool
    ):
        tags = tag_vocabulary(reasoning, tools, tokens, has_schemas=bool(schemas))
        self.markers = tags.markers  # the tags that this parser may consume
        self._codec = tags.codec
        is_plain, is_bounded = reasoning is None and not tools, opening is not ReasoningOpening.ANYWHERE
        self._writer = ContentWriter(self._codec, is_plain=is_plain, is_bounded=is_bounded)
        self._content = self._writer.framing
        self._pending = Pending(self._codec, self._writer)
        self._reasoning = ReasoningWriter(
            reasoning, self._writer, self._codec, starts_open=starts_in_reasoning, opening=opening
        )
        self._calls = CallParser(
            tags, self._pending, self._writer, self._reasoning,
            schemas=schemas, call_ids=call_ids, takes_undeclared=takes_undeclared,
        )  # fmt: skip

    @property
    def in_reasoning(self) -> bool:
        """Counts depth: an opening tag inside reasoning needs a closing tag of its own."""
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
