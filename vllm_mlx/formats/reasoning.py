"""Decides which text of a reply is reasoning, and emits that text."""

from ..core.events import ContentEvent, ReasoningDelta
from .content import ContentWriter, Framing
from .family import ReasoningFormat, ReasoningOpening
from .vocabulary import TokenCodec


class ReasoningWriter:
    """Follows the reasoning of one reply. While `is_open`, the text that follows is reasoning."""

    def __init__(
        self,
        format: ReasoningFormat | None,
        writer: ContentWriter,
        codec: TokenCodec,
        *,
        starts_open: bool,
        opening: ReasoningOpening,
    ):
        self._writer = writer
        self._codec = codec
        self._opening = opening
        self._framing = Framing()
        self._framing.before_reasoning()
        self._is_dropped = False  # the message is for neither the user nor a tool, and is not reasoning
        self._dropped = ""  # the texts of such messages: content if the reply has nothing else
        self._has_call = False
        self._is_interrupted = False  # a call began inside; reasoning continues after it until its closing tag
        self._is_in_messages = format is not None and bool(format.header_tags)
        self._last = ""  # the last character that was emitted
        self._begins = False  # the next reasoning is not the continuation of the last
        self._has_messages = format is not None and format.headed is not None
        self._is_shown = format is not None and format.is_shown
        self.is_open = format is not None and (starts_open or format.is_implied)
        self._unshown_tag = format.opens[0] if format is not None and self._is_shown and self.is_open else ""
        self.depth = int(self.is_open)  # an opening tag inside reasoning needs its own closing tag

    @property
    def may_open(self) -> bool:
        """Return whether an opening tag counts here. Inside reasoning it does, but it does not open reasoning twice."""
        if self.is_open or self._opening is ReasoningOpening.ANYWHERE:
            return True
        return self._opening is ReasoningOpening.AT_START and self._writer.framing.is_at_start

    def append(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that ends where the text read so far ends, as reasoning or as content."""
        if self._is_interrupted:
            return  # it is white space
        if not self.is_open:
            self._writer.feed(text, out)
        elif not self._is_shown:
            self._emit(self._framing.feed(text), out)
        elif text:
            if self._unshown_tag:
                self._writer.emit_extra(self._unshown_tag, out)
            self._show(text, out)

    def open(self, tag: str, out: list[ContentEvent]) -> None:
        """Open reasoning at its opening tag."""
        if self._is_shown:
            self._show(tag, out)
        if not self.is_open:
            self._begin()
        is_once = self._opening is not ReasoningOpening.ANYWHERE
        if not (self.is_open and (self._framing.is_at_start or is_once)):
            self.depth += 1
        self.is_open = True

    def close(self, tag: str, out: list[ContentEvent]) -> None:
        """Close reasoning at its closing tag, which counts even if no reasoning is open."""
        if self.is_open and self._is_shown:
            self._show(tag, out)
        self.depth = max(0, self.depth - 1)
        self._end()

    def begin_message(self, *, is_reasoning: bool, is_dropped: bool = False) -> None:
        """Begin the part that the header of a message announced. `is_dropped`: shown only if there is no other text."""
        self._is_dropped = is_dropped
        if is_reasoning:
            self._begin()
            self.is_open = True
            self.depth = 1
            if self._framing.is_at_start:
                self._framing.before_reasoning()
        else:
            self.depth = 0
            self._end()
            self._writer.begins_message = self._has_messages

    def stop(self) -> None:
        """Interrupt the reasoning because a call began."""
        self._has_call = True
        self._is_interrupted |= self.is_open and not (self._is_in_messages or self._is_shown)
        self.is_open = False
        self.depth = 0
        self._framing.before_reasoning()

    def resume(self, text: str) -> bool:
        """Continue the reasoning that a call interrupted, if `text` is more than white space."""
        if not self._is_interrupted or not text.strip():
            return False
        self._is_interrupted = False
        self.is_open = True
        self.depth = 1
        return True

    def finish(self, out: list[ContentEvent], *, has_call: bool) -> None:
        """Emit the text that was held back. `has_call`: the reply ends inside a call."""
        if self.is_open and not self._is_shown:
            self._emit(self._framing.finish(), out)
        elif not has_call:
            self._writer.emit(self._writer.framing.finish(), out)
        if not (has_call or self._has_call or self._writer.has_text):
            self._writer.feed_made(self._dropped, out)

    def _begin(self) -> None:
        """Keep reasoning that begins now apart from the reasoning before it."""
        self._begins |= self._writer.framing.follows_reasoning
        self._is_interrupted = False

    def _end(self) -> None:
        self._is_interrupted = False
        if self._opening is ReasoningOpening.AT_START:
            self._opening = ReasoningOpening.NEVER
        if not self.is_open:
            self._writer.framing.absorb_close()
            return
        self.is_open = False
        self._framing.before_reasoning()
        if not self._is_shown:
            self._writer.framing.after_reasoning()

    def _emit(self, text: str, out: list[ContentEvent]) -> None:
        if self._is_dropped:
            self._dropped += text
        elif text:
            lead = "\n" if self._begins and self._last not in ("", "\n") and text[0] != "\n" else ""
            self._begins, self._last = False, text[-1]
            out.append(ReasoningDelta(lead + self._codec.decode(text)))

    def _show(self, text: str, out: list[ContentEvent]) -> None:
        self._unshown_tag = ""
        self._writer.emit(text, out)
