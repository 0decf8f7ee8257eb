"""Conversations as agents send them, whose texts are all different, and what a whole prompt says of them."""

import random
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, ToolSpec

NAMES = ("read_file", "grep_text", "list_dir")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = tuple(ToolSpec(name, "Does.", SCHEMA) for name in NAMES)


@dataclass
class History:
    """Messages, and the order of their texts.

    Letters: s, u, a: a text; 2: two texts of the user; x, y, z: an empty message of the assistant, of the user, an
    empty result; b: reasoning and a text; c, d, e: one to three calls; t: a text with two calls; T: with reasoning,
    too; r: the next result, R: the last one that is missing, p: the next in two parts, f: the next, an error;
    l: the oldest result that is missing; o: a result of an unknown call.
    """

    messages: list[Message] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    called: dict[str, str] = field(default_factory=dict)  # a call's or a result's text → the name of the call
    _pairs: list[tuple[str, str]] = field(default_factory=list)  # the first comes before the second
    _last: list[str] = field(default_factory=list)
    _calls: list[tuple[ToolCallPart, str]] = field(default_factory=list)  # without a result

    def add(self, letter: str) -> None:
        add = self.messages.append
        match letter:
            case "s" | "u" | "a" | "2":
                role = {"s": "system", "a": "assistant"}.get(letter, "user")
                is_leading = letter == "s" and all(message.role == "system" for message in self.messages)
                texts = [self._text(is_free=is_leading) for _ in range(1 + (letter == "2"))]
                add(Message(role, tuple(texts)))  # type: ignore[arg-type]
            case "x" | "y":
                add(Message("assistant" if letter == "x" else "user", (TextPart(""),)))
            case "b":
                add(Message("assistant", (ReasoningPart("why"), self._text())))
            case "c" | "d" | "e" | "t" | "T":
                said: list[Part] = [ReasoningPart("why")] if letter == "T" else []
                said += [self._text()] if letter in "tT" else []
                add(Message("assistant", (*said, *self._ask({"c": 1, "e": 3}.get(letter, 2)))))
            case "o":
                add(Message("tool", (ToolResultPart(f"call_gone{len(self.marks)}", (self._text(),)),)))
            case _ if self._calls:
                call, asked = self._calls.pop(-1 if letter == "R" else 0)
                parts = [] if letter == "z" else [self._mark() for _ in range(1 + (letter == "p"))]
                for before, mark in zip([asked, *parts], parts, strict=False):
                    self._pairs.append((before, mark))
                    self.called[mark] = call.name
                self._last += parts
                add(Message("tool", (ToolResultPart(call.call_id, tuple(map(TextPart, parts)), None, letter == "f"),)))

    def fault(self, text: str) -> str | None:
        """What a prompt lacks; None if it has every text once, in order, and each result under its own call."""
        for mark in self.marks:
            if text.count(mark) != 1:
                return f"{mark} is there {text.count(mark)} times"
        for before, mark in self._pairs:
            if text.find(before) > text.find(mark):
                return f"{before} is behind {mark}"
        places = sorted((text.find(mark), mark) for mark in self.marks)
        ends = [0, *(place + len(mark) for place, mark in places)]
        for end, (place, mark), behind in zip(ends, places, [*places[1:], (len(text), "")], strict=False):
            name, between = self.called.get(mark), text[end:place]
            if name is None:
                continue
            if mark.startswith("ask") and name not in between + text[place : behind[0]]:
                return f"{mark} has no name"
            others = [other for other in NAMES if other in between]
            if mark.startswith("text") and others and name not in others:
                return f"{mark} is filed under {others}"
        return None

    def _mark(self, kind: str = "text") -> str:
        self.marks.append(f"{kind}{len(self.marks)}.")
        return self.marks[-1]

    def _text(self, *, is_free: bool = False) -> TextPart:
        mark = self._mark()
        if not is_free:
            self._pairs += [(before, mark) for before in self._last]
            self._last = [mark]
        return TextPart(mark)

    def _ask(self, count: int) -> list[ToolCallPart]:
        calls = []
        before = self._last
        for number in range(count):
            mark = self._mark("ask")
            self._pairs += [(earlier, mark) for earlier in before]
            before = self._last = [mark]
            name = NAMES[(len(self.marks) + number) % 3]
            self.called[mark] = name
            calls.append(ToolCallPart(f"call_{len(self.marks):04}", name, {"path": mark}))
            self._calls.append((calls[-1], mark))
        return calls


def history(shape: str) -> History:
    made = History()
    for letter in shape:
        made.add(letter)
    return made


def random_shape(draw: random.Random) -> str:
    return "".join(draw.choices("suu2aabccdetTrrrrRpfzxyol", k=draw.randint(1, 10)))


_SHAPES = (
    "u su uu suu uauuu ucr sucru tRr trr drr dRr dru dRu err utrr utrrau sutrraucr ucru ucrua udrru ucu ucau au sau "
    "uaa ubb uacr uacra utau s sa cr scr scrau oau socr acrcra uou uaou uco ucoau ucro uasu uaus ucrs ssu ucz ucp ucf "
    "uTrr uTrrau ux uxu y uay ua sudrrasaucr suaucrcru ucruu ccr ccrr udrrcrau ucurau uculau ucual ucucrl crau scru "
    "dcrrr uuucrrTrra subtrzua u2a2 xu yx ucyr"
)
SHAPES = tuple(_SHAPES.split())
