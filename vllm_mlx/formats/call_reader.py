"""A parser that says when a reply has begun a call whose name is not complete. Its events are ignored."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .family import Opening
from .open_call import OpenCall
from .output_parser import OutputParser


@dataclass(frozen=True, slots=True)
class UnnamedCall:
    """A call that has begun and has no name yet. `call` is None while its marker may still be written twice."""

    call: OpenCall | None
    opening: Opening
    read_text: Callable[[], str]  # the text after its marker, as long as nothing more is fed
    is_quoted: bool

    def continues(self, earlier: "UnnamedCall") -> bool:
        """Whether this is the same call as the earlier one."""
        is_begun_now = earlier.call is None and self.call is not None and not self.call.is_further
        return self.call is earlier.call or (is_begun_now and self.opening is earlier.opening)

    @property
    def is_further(self) -> bool:
        """Whether it follows another call in the same tags."""
        return self.call is not None and self.call.is_further


class CallReader(OutputParser):
    @property
    def is_idle(self) -> bool:
        """Whether text without the first character of a tag would be content: it may be skipped."""
        return self._call is None and not self._pending and not self._content.is_at_start

    def skip(self, text: str) -> None:
        """Take text that contains no tag, without any event."""
        self._writer.quoting.feed(text)

    def may_begin_tag(self, text: str) -> bool:
        return self._tags.in_text.may_begin_in(text)

    @property
    def pending(self) -> str:
        """Text outside of calls that may still become a tag; nothing, if that tag would be quoted."""
        if self._call is not None or not self._pending or self._writer.quoting.is_quoted:
            return ""
        return self._codec.decode(self._pending)

    @property
    def unnamed(self) -> UnnamedCall | None:
        """The call that has begun, if it has no name yet."""
        call = self._call
        if call is None:
            return self._undecided() if self._pending else None
        if call.is_named:
            return None
        return UnnamedCall(call, call.opening, partial(self._text_of, call), call.is_quoted)

    def _text_of(self, call: OpenCall) -> str:
        text = "".join(call.raw) + self._pending
        return self._codec.decode(text if call.is_further else text.removeprefix(call.marker))

    def _undecided(self) -> UnnamedCall | None:
        """The call whose marker is pending, because the same may follow."""
        end, marker = self._cut(final=False)
        if marker is None or marker not in self._tags.openings or self._pending[:end].strip():
            return None
        text = partial(self._codec.decode, self._pending[end + len(marker) :])
        return UnnamedCall(None, self._tags.openings[marker], text, self._writer.is_quoted(marker))
