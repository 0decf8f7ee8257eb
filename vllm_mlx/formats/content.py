"""Decides which text of a reply is content, and emits it without layout and with the tags that the reply quotes."""

import re
from enum import Enum, auto

from ..core.events import ContentEvent, TextDelta
from .vocabulary import TagVocabulary, TokenCodec

MAX_MARGIN = 256  # characters in which a marker may follow itself
_FENCES = ("```", "~~~")
_QUOTES = "\"'“‘«‹"
_MENTION = re.compile(r" [{(]?\w|[.,;:!?)]")


class ContentWriter:
    def __init__(self, codec: TokenCodec, *, is_plain: bool, is_bounded: bool = False) -> None:
        """`is_plain`: the reply has no tags, so all white space is content. `is_bounded`: a grammar bounds the answer,
        so a tag that is plain text inside the answer is part of it.
        """
        self._codec = codec
        self._is_bounded = is_bounded
        self.has_quoted = False  # whether a tag of the model's own format was shown, because the model quoted it
        self.framing = Framing(is_plain=is_plain)
        self.quoting = Quoting()
        self.position = 0  # characters of the reply that were read so far
        self.spans: list[tuple[int, int]] = []  # (start, end) of each text emitted since this list was cleared
        self.begins_message = False  # the next text begins a message, so a line break comes before it
        self._held = ""  # text that counts only if more visible text follows
        self._shown_to = 0  # end of the last text's span

    @property
    def has_text(self) -> bool:
        return self._shown_to > 0

    def feed(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that ends where the text read so far ends."""
        self.emit(self.framing.feed(text), out)

    def emit(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that the framing returned."""
        if text := self._codec.decode(text):
            end = self.position - self.framing.num_held
            self._emit(text, end - len(text), end, out)

    def feed_made(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that represents everything read since the last text."""
        if text := self._codec.decode(self.framing.feed(text)):
            self._emit(text, self._shown_to, max(self._shown_to, self.position), out)

    def hold(self, text: str) -> None:
        """Emit the text, but only once more visible text follows."""
        self._held += self._codec.decode(text)

    def emit_extra(self, text: str, out: list[ContentEvent]) -> None:
        """Emit text that the model did not write."""
        self._emit(text, self._shown_to, self._shown_to, out)

    def quotes(self, marker: str, text: str, tags: TagVocabulary) -> bool:
        """Return whether the reply writes about the marker, with which the `text` begins, instead of using it."""
        if marker in tags.openings:
            return False  # the following text decides
        end = tags.end_of(marker, text) or 0
        is_plain = marker in tags.strays and (self.has_quoted or marker in tags.wrap[:1] or end > len(marker))
        is_mentioned = is_plain and self.is_mentioned(text[end:])
        if not is_mentioned and (not self.is_quoted(marker) or (self._is_bounded and marker in tags.reasoning_closes)):
            return False
        self.has_quoted = True
        return True

    def is_mentioned(self, behind: str, num_chars: int = 0) -> bool:
        """Return whether the tag `num_chars` before the current position, followed by `behind`, is only mentioned."""
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


class Pending:
    """The text of one reply that was fed and is not read yet. It may still become a tag."""

    def __init__(self, codec: TokenCodec, writer: ContentWriter):
        self._codec = codec
        self._writer = writer
        self.text = ""

    def take(self, num_chars: int) -> str:
        """Read some of the text."""
        text, self.text = self.text[:num_chars], self.text[num_chars:]
        self._writer.position += self._codec.num_chars(text)
        return text

    def put_back(self, text: str) -> None:
        """Let text that was read be read again, in another way."""
        self.text = text + self.text
        self._writer.position -= self._codec.num_chars(text)

    def behind(self, marker: str) -> str:
        """Return the text behind `marker`, which begins the text, without white space: the marker may follow again."""
        return self.text[len(marker) : len(marker) + MAX_MARGIN].lstrip()


# White space around tags


class _After(Enum):
    START = auto()
    REASONING = auto()
    CALL = auto()
    OPENING = auto()  # the tag that opens reasoning
    TEXT = auto()


class Framing:
    """Holds white space back until it is known to be part of the content, or of the reasoning.

    White space alone before a tag is layout, and so are line breaks directly after reasoning, one behind the tag that
    opens reasoning, and one before the tag that ends reasoning or a wrapped answer. All other white space is shown.
    The text that `feed` returns ends where the text fed so far ends, or `num_held` characters before.
    """

    def __init__(self, *, is_plain: bool = False) -> None:
        """`is_plain`: the reply has no tags, so all white space is content."""
        self._after = _After.TEXT if is_plain else _After.START
        self._held = ""
        self.is_wrapped = False

    @property
    def follows_call(self) -> bool:
        return self._after is _After.CALL

    @property
    def follows_reasoning(self) -> bool:
        return self._after is _After.REASONING

    @property
    def is_at_start(self) -> bool:
        return self._after is not _After.TEXT

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        if self._after is _After.TEXT and not self.is_wrapped:
            return text
        if self._after is not _After.TEXT and (not text or text.isspace()):
            self._held += text
            return ""
        text = self._held + text
        self._held = ""
        if self._after is _After.REASONING:
            text = text.lstrip("\n")
        elif self._after is _After.OPENING:
            text = text.removeprefix("\n")
        self._after = _After.TEXT
        if self.is_wrapped and text.endswith("\n"):
            self._held = "\n"
            return text[:-1]
        return text

    def release(self) -> str:
        """Return the text held back inside an answer, because no tag that ends the answer followed."""
        held, self._held = (self._held, "") if self._after is _After.TEXT else ("", self._held)
        return held

    def before_reasoning(self) -> None:
        """Frame the next text as reasoning, between its tags."""
        self._held = ""
        self._after = _After.OPENING
        self.is_wrapped = True

    def after_reasoning(self) -> None:
        self._held = ""
        self._after = _After.REASONING

    def after_call(self) -> None:
        self._held = ""
        self._after = _After.CALL

    def set_wrapped(self, is_wrapped: bool) -> None:
        """Begin or end a wrapped answer."""
        self.after_reasoning()
        self.is_wrapped = is_wrapped

    def absorb_close(self) -> None:
        """Drop a closing tag of reasoning that is not open, and the white space before it."""
        if self._after is not _After.TEXT:
            self.after_reasoning()

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held if self._after in (_After.START, _After.TEXT) else ""


# Tags that a reply writes about


class Quoting:
    """Follows the content of one reply. A text is examined only when a tag after it is asked about.

    A tag is quoted in a code block, in a code span, or directly after a quotation mark. It is mentioned if it is
    between the words of a line, like one of them.
    """

    def __init__(self) -> None:
        self._unread: list[str] = []
        self._is_fenced = False
        self._line_start = ""  # the first visible characters of the current line
        self._num_ticks = 0  # in the current line
        self._last = ""  # the last two characters

    def feed(self, text: str) -> None:
        self._unread.append(text)

    @property
    def is_quoted(self) -> bool:
        """Return whether a tag that follows now is quoted."""
        self._read()
        if (self._is_fenced or self._num_ticks % 2) and not self._line_start.startswith(_FENCES):
            return True
        return self._last[-1:] in _QUOTES and self._last != "" and not self._last[:-1].isalnum()

    def is_mentioned(self, behind: str) -> bool:
        """Return whether a tag that follows now, with the text `behind` it, is mentioned."""
        self._read()
        return self._last[-1:] == " " and self._line_start != "" and _MENTION.match(behind) is not None

    @property
    def last(self) -> str:
        """Return the last character, or ""."""
        self._read()
        return self._last[-1:]

    def _read(self) -> None:
        if not self._unread:
            return
        text = "".join(self._unread)
        self._unread.clear()
        self._last = (self._last + text)[-2:]
        first, *lines = text.split("\n")
        self._extend(first)
        for line in lines:
            self._is_fenced ^= self._line_start.startswith(_FENCES)
            self._line_start, self._num_ticks = "", 0
            self._extend(line)

    def _extend(self, text: str) -> None:
        if len(self._line_start) < len(_FENCES[0]):
            self._line_start = (self._line_start + text).lstrip()[: len(_FENCES[0])]
        self._num_ticks += text.count("`")
