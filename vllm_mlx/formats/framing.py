"""Removes the white space around tags, which is layout and no part of the text."""

from enum import Enum, auto


class _After(Enum):
    START = auto()
    REASONING = auto()
    CALL = auto()
    TEXT = auto()


class ContentFraming:
    """Holds white space back until it is known to be content.

    White space alone before a tag is layout, and so are line breaks directly after reasoning, and the one before a tag
    that ends a wrapped answer. All other white space is content. The text that `feed` returns ends where the text fed
    so far ends, or `num_held` characters before.
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
        if self._after is not _After.TEXT:
            text = text.lstrip("\n") if self._after is _After.REASONING else text
            self._after = _After.TEXT
        if self.is_wrapped and text.endswith("\n"):
            self._held = "\n"
            return text[:-1]
        return text

    def release(self) -> str:
        """Return what was held back inside an answer, because no tag that ends the answer followed."""
        held, self._held = (self._held, "") if self._after is _After.TEXT else ("", self._held)
        return held

    def after_reasoning(self) -> None:
        self._held = ""
        self._after = _After.REASONING

    def after_call(self) -> None:
        self._held = ""
        self._after = _After.CALL

    def open_wrap(self) -> None:
        self.after_reasoning()
        self.is_wrapped = True

    def close_wrap(self) -> None:
        self.after_reasoning()
        self.is_wrapped = False

    def absorb_close(self) -> None:
        """Drop a closing tag of reasoning that is not open, and the white space before it."""
        if self._after is not _After.TEXT:
            self.after_reasoning()

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held if self._after in (_After.START, _After.TEXT) else ""


class ReasoningFraming:
    """Drops a line break after the opening tag, one before the closing tag, and reasoning of only white space."""

    def __init__(self) -> None:
        self.is_blank = True
        self._held = ""

    def feed(self, text: str) -> str:
        if self.is_blank and (not text or text.isspace()):
            self._held += text
            return ""
        text = self._held + text
        self._held = ""
        if self.is_blank:
            self.is_blank = False
            text = text.removeprefix("\n")
        if text.endswith("\n"):
            self._held = "\n"
            return text[:-1]
        return text

    def close(self) -> None:
        self._held = ""
        self.is_blank = True

    def finish(self) -> str:
        return "" if self.is_blank else self._held
