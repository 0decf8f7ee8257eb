"""Emits the content of one reply, and says which characters of the reply each text stands for."""

from ..core.events import ContentEvent, TextDelta
from .framing import ContentFraming
from .quoting import Quoting
from .vocabulary import TagVocabulary, TokenCodec


class ContentWriter:
    def __init__(self, codec: TokenCodec, *, is_plain: bool, is_bounded: bool = False) -> None:
        """`is_plain`: the reply has no tags, so all white space is content. `is_bounded`: a grammar bounds the answer,
        so a tag that is plain text inside the answer is part of it.
        """
        self._codec = codec
        self._is_bounded = is_bounded
        self.has_quoted = False  # whether a tag of the model's own format was shown, because the model quoted it
        self.framing = ContentFraming(is_plain=is_plain)
        self.quoting = Quoting()
        self.position = 0  # characters of the reply that were read so far
        self.spans: list[tuple[int, int]] = []  # (start, end) of each text emitted since this list was cleared
        self.begins_message = False  # the next text is a message of its own: a line break comes before it
        self._held = ""  # text that counts only if more visible text follows
        self._shown_to = 0  # where the span of the last text ends

    def feed(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that ends where the text read so far ends."""
        self.emit(self.framing.feed(text), out)

    def emit(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that the framing returned."""
        if text := self._codec.decode(text):
            end = self.position - self.framing.num_held
            self._emit(text, end - len(text), end, out)

    def feed_made(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that stands for everything that was read since the last text."""
        if text := self._codec.decode(self.framing.feed(text)):
            self._emit(text, self._shown_to, max(self._shown_to, self.position), out)

    def hold(self, text: str) -> None:
        """Emit the text, but only once more visible text follows."""
        self._held += self._codec.decode(text)

    def emit_extra(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that stands for nothing that the model wrote."""
        self._emit(text, self._shown_to, self._shown_to, out)

    def quotes(self, marker: str, behind: str, tags: TagVocabulary) -> bool:
        """Whether the reply writes about the marker, with the text `behind` it, instead of using it."""
        if marker in tags.openings:
            return False  # what follows decides
        is_plain = marker in tags.strays and (self.has_quoted or marker in tags.wrap[:1])
        is_mentioned = is_plain and self.is_mentioned(behind)
        if not is_mentioned and (not self.is_quoted(marker) or (self._is_bounded and marker in tags.reasoning_closes)):
            return False
        self.has_quoted = True
        return True

    def is_mentioned(self, behind: str, num_chars: int = 0) -> bool:
        """Whether the tag that begins `num_chars` before the current position is mentioned, with `behind` after it."""
        return self._shown_to == self.position - num_chars and self.quoting.is_mentioned(behind)

    def is_quoted(self, marker: str) -> bool:
        is_text = self._is_bounded and not self.framing.is_at_start and not self._codec.is_coded(marker)
        return is_text or self.quoting.is_quoted

    def begin_line(self, out: list[ContentEvent]) -> None:
        if self.quoting.last.strip():
            self.emit_extra("\n", out)

    def _emit(self, text: str, start: int, end: int, out: list[ContentEvent]) -> None:
        if self._held and text.strip():
            held, self._held = self._held, ""
            self._emit(held, self._shown_to, max(self._shown_to, start), out)
        if self.begins_message and text.strip():
            self.begins_message = False
            if self.quoting.last not in ("", "\n"):
                self._emit("\n", start, start, out)
        self.quoting.feed(text)
        self._shown_to = end
        self.spans.append((start, end))
        out.append(TextDelta(text))
