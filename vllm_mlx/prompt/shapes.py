"""Finds the conversations that a template takes, by rendering small ones that are never sent to a model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.messages import ImagePart, Message, ReasoningPart, Role, ShownPart, TextPart, ToolCallPart, ToolResultPart

Render = Callable[[Sequence[Message], bool | None], str | None]  # messages, has_tools; None if they are refused

PROBE_NAMES = ("probe_tool", "probe_other")
_ROLES: dict[str, Role] = {"s": "system", "u": "user", "y": "user", "a": "assistant", "x": "assistant"}


class Shapes:
    """Remembers for each shape of a conversation whether the template writes it whole. Threads may share it.

    A shape has a letter for each message:
    s, u, a: a text of the system, the user, the assistant; y, x: an empty message of the user, of the assistant;
    c, C: one call, two calls; t, T: a call with a text, with reasoning and a text;
    r, R: the result of the first call, of the last call that has none; z: an empty one; i: one with an image;
    o, n: the result of an unknown call, without a name and with one.

    `has_tools` is None: without the variable for tools, even if the template demands it.
    """

    def __init__(self, render: Render, image: str | None):
        """`image`: the text that the template writes for an image."""
        self._render = render
        self._image = image
        self._taken: dict[tuple[str, bool | None], bool] = {}

    def takes(self, shape: str, has_tools: bool | None) -> bool:
        """Return whether the template writes each text once and in order, and names no wrong call before a result."""
        key = (shape, has_tools)
        if key not in self._taken:
            probe = Probe(shape, self._image)
            text = self._render(probe.messages, has_tools)
            self._taken[key] = text is not None and probe.is_whole(text, has_tools)
        return self._taken[key]

    def shows_tools(self, shape: str) -> bool:
        """Return whether the prompt with tools is another than the prompt without them."""
        messages = Probe(shape, self._image).messages
        shown = self._render(messages, True)
        return shown is not None and shown != self._render(messages, False)


@dataclass(slots=True)
class Probe:
    """A conversation of a shape. Each of its texts, the marks, is unique."""

    shape: str
    image: str | None = None
    messages: list[Message] = field(init=False)
    marks: list[str] = field(default_factory=list)
    _called: dict[str, str] = field(default_factory=dict)  # the mark of a result → the name of its call
    _waiting: list[ToolCallPart] = field(default_factory=list)
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self.messages = [self._message(letter) for letter in self.shape]

    def is_whole(self, text: str, has_tools: bool | None) -> bool:
        places = [text.find(mark) for mark in self.marks]
        if any(text.count(mark) != 1 for mark in self.marks):
            return False
        # Some templates show the first system message later.
        num_free = 0 if has_tools is None else len(self.shape) - len(self.shape.lstrip("s"))
        if places[num_free:] != sorted(places[num_free:]):
            return False
        starts = [0, *(place + len(mark) for place, mark in zip(places, self.marks, strict=True))]
        for start, place, mark in zip(starts, places, self.marks, strict=False):
            between, called = text[start:place], self._called.get(mark)
            if called is not None and called not in between and any(name in between for name in PROBE_NAMES):
                return False
        # A model would read a system message's text at the start of a reply as its own.
        pairs = zip(itertools.pairwise(self.shape), starts[1:], places[1:], strict=False)
        is_joined = (pair == ("s", "a") and not text[start:place].strip() for pair, start, place in pairs)
        return has_tools is not None or not any(is_joined)

    def _message(self, letter: str) -> Message:
        match letter:
            case "s" | "u" | "a" | "y" | "x":
                return Message(_ROLES[letter], (TextPart("") if letter in "yx" else self._text(),))
            case "c" | "C":
                return Message("assistant", tuple(self._call() for _ in range(1 if letter == "c" else 2)))
            case "t" | "T":
                reasoning = (ReasoningPart("reasoning"),) if letter == "T" else ()
                return Message("assistant", (*reasoning, self._text(), self._call()))
            case "o" | "n":
                name = PROBE_NAMES[0] if letter == "n" else None
                return Message("tool", (ToolResultPart("call_unknown", (self._text(),), name),))
            case _:
                return Message("tool", (self._result(letter),))

    def _text(self) -> TextPart:
        self.marks.append(f"probe{len(self.marks)}.")
        return TextPart(self.marks[-1])

    def _call(self) -> ToolCallPart:
        name = PROBE_NAMES[self._num_calls % 2]
        self._waiting.append(ToolCallPart(f"call_of_probe{self._num_calls}", name, {"probe_key": self._text().text}))
        self._num_calls += 1
        return self._waiting[-1]

    def _result(self, letter: str) -> ToolResultPart:
        call = self._waiting.pop(-1 if letter == "R" else 0)
        content: tuple[ShownPart, ...] = () if letter == "z" else (self._text(),)
        if content:
            self._called[self.marks[-1]] = call.name
        if letter == "i" and self.image is not None:
            content = (*content, ImagePart(b""))
            self.marks.append(self.image)
        return ToolResultPart(call.call_id, content)
