"""A tool call that is being read, and the text that replaces it if it is no call or its tool is not declared."""

import json
import secrets
from collections.abc import Callable

from .bodies import Body
from .family import Opening, Place
from .vocabulary import TagVocabulary


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallIds:
    """The ids of one reply's calls: an id that the model wrote is used once, and any other is made."""

    def __init__(self, make: Callable[[], str]):
        self._make = make
        self._used: set[str] = set()

    def take(self, native: str | None) -> str:
        call_id = native if native is not None and native not in self._used else self._make()
        self._used.add(call_id)
        return call_id


class OpenCall:
    """`marker` is the tag that began it, in the form in which the parser found it."""

    def __init__(self, body: Body, opening: Opening, marker: str, *, is_native: bool, is_quoted: bool):
        """`is_native`: the tag belongs to the model's own format. `is_quoted`: the reply writes about the tag."""
        self.body = body
        self.opening = opening
        self.marker = marker
        self.raw: list[str] = []  # the text read so far, tags included
        self.is_at_own_marker = opening.keeps_marker  # the body still has to read the tag that began the call
        self.is_started = False
        self.is_refused = False  # the tool is not declared: the call is text, read only to find where it ends
        self.has_tags = is_native and not is_quoted and opening.place is Place.ANYWHERE
        """Whether the call is in tags of the model's own format, none of which may be shown."""
        self.is_plain_block = is_native and not is_quoted and opening.place is Place.OUTSIDE_REASONING
        """Whether the block of calls is plain text, such as a list. An empty one that is the only content is text."""
        self.is_further = False  # no tag of its own began it: it follows another call in a list
        self.is_quoted = is_quoted
        self.described: str | None = None  # the name of a tool that is not declared: the call is shown as JSON
        self.has_head = False  # the start of that JSON was shown

    @property
    def is_named(self) -> bool:
        return self.is_started or self.is_refused or self.described is not None

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
        """Return the next call of a list of calls, which has no tag of its own."""
        call = OpenCall(body, self.opening, self.marker, is_native=False, is_quoted=False)
        call.is_at_own_marker = False
        call.is_further = True
        call.has_tags = self.has_tags
        return call

    def description(self, arguments: str) -> str:
        """Return the next part of the JSON that shows a call of an undeclared tool. `arguments`: JSON text read now."""
        if self.has_head or not arguments:
            return arguments
        self.has_head = True
        return f'{{"name": {json.dumps(self.described, ensure_ascii=False)}, "arguments": {arguments}'
