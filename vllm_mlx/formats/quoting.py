"""Decides whether a tag is quoted: whether the reply writes about the tag instead of using it. Knows no tag."""

import re

_FENCES = ("```", "~~~")
_QUOTES = "\"'“‘«‹"
_MENTION = re.compile(r" \w|[.,;:!?)]")


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
        """Whether a tag that follows now is quoted."""
        self._read()
        if (self._is_fenced or self._num_ticks % 2) and not self._line_start.startswith(_FENCES):
            return True
        return self._last[-1:] in _QUOTES and self._last != "" and not self._last[:-1].isalnum()

    def is_mentioned(self, behind: str) -> bool:
        """Whether a tag that follows now, with the text `behind` it, is mentioned."""
        self._read()
        return self._last[-1:] == " " and self._line_start != "" and _MENTION.match(behind) is not None

    @property
    def last(self) -> str:
        """The last character, or nothing."""
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
