"""Rewrites conversations for a template that cannot write them completely, which it finds by rendering probes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.messages import MediaPart, Message, Part, ReasoningPart, Role, TextPart, ToolCallPart, ToolResultPart
from .template_messages import as_user

Render = Callable[[Sequence[Message], bool | None], str | None]  # messages, has_tools; None if they are refused

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # the form that Claude Code uses for older models
SAID = "<assistant>\n{}\n</assistant>"  # a text of the assistant that no turn of the assistant can hold
FILLER = TextPart("...")  # the text of a message that must not be empty
NO_TEXT = Message("user", (TextPart(""),))
PROBE_NAMES = ("probe_tool", "probe_other")


@dataclass(frozen=True, slots=True)
class Placed:
    """A conversation in the form in which its template writes it completely, and the rules that changed it."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...] = ()


class Turns:
    """Changes what the template refuses, loses or moves, and nothing else. Threads may share it.

    A rule needs only the messages before the place that it changes, where the template allows that, so the prompt
    still begins with the prompt of the messages before. What a template takes is found once, when it first matters.
    """

    def __init__(self, render: Render):
        self._render = render
        self._taken: dict[tuple[str, bool | None], bool] = {}

    def place(self, messages: Sequence[Message], *, has_tools: bool = False, continues: bool = False) -> Placed:
        """`messages`: each tool result in a message of its own. `continues`: the reply continues the last message."""
        rewriting = _Rewriting(self, has_tools, continues)
        placed = rewriting.run(messages)
        return replace(rewriting, hides_system=True).run(messages) if rewriting.loses_system(placed) else placed

    def needs(self, has_tools: bool) -> tuple[str, ...]:
        """Return the rules that the template needs for any conversation."""
        samples = (self.place(_probe(shape).messages, has_tools=has_tools).rules for shape in _SAMPLES)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(samples)))

    def takes(self, shape: str, has_tools: bool | None) -> bool:
        """Whether the template writes each text of such a conversation once and in order. `shape`: as for `_probe`.

        `has_tools` None: without the variable for tools, even if the template demands it.
        """
        key = (shape, has_tools)
        if key not in self._taken:
            self._taken[key] = self._writes(shape, has_tools)
        return self._taken[key]

    def shows_tools(self, shape: str) -> bool:
        """Whether the prompt of such a conversation shows tools."""
        messages = _probe(shape).messages
        return self._render(messages, True) != self._render(messages, False)

    def _writes(self, shape: str, has_tools: bool | None) -> bool:
        probe = _probe(shape)
        text = self._render(probe.messages, has_tools)
        if text is None or any(text.count(mark) != 1 for mark in probe.marks):
            return False
        places = [text.find(mark) for mark in probe.marks]
        ordered = places if has_tools is None else places[len(shape) - len(shape.lstrip("s")) :]
        if ordered != sorted(ordered):
            return False
        ends = [0, *(place + len(mark) for place, mark in zip(places, probe.marks, strict=True))]
        for end, place, mark in zip(ends, places, probe.marks, strict=False):
            before, called = text[end:place], probe.called.get(mark)
            # A result must not bear the name of another call.
            if called is not None and called not in before and any(name in before for name in PROBE_NAMES):
                return False
        # A model would read a system message's text at the start of a reply as its own.
        pairs = zip(itertools.pairwise(shape), ends[1:], places[1:], strict=False)
        return not any(has_tools is None and pair == ("s", "a") and not text[end:place].strip() for pair, end, place in pairs)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A conversation that is never sent to a model."""

    messages: list[Message]
    marks: list[str]  # the texts, in their order
    called: dict[str, str]  # the text of a result → the name of its call


def _probe(shape: str) -> _Probe:
    """Make a conversation with a message for each letter.

    s, u, a: a text of system, user or assistant; c, C, t: one call, two calls, a text with a call, T: with reasoning, too; r, R: the result of
    the first or the last call without one; o, n: the result of an unknown call, without and with a name; y, x, z: an empty message of the user,
    of the assistant, an empty result.
    """
    probe, waiting, numbers = _Probe([], [], {}), [], itertools.count()

    def mark() -> TextPart:
        probe.marks.append(f"probe{next(numbers)}.")
        return TextPart(probe.marks[-1])

    def call() -> ToolCallPart:
        number = next(calls)
        waiting.append(ToolCallPart(f"call_of_probe{number}", PROBE_NAMES[number % 2], {"probe_key": mark().text}))
        return waiting[-1]

    calls = itertools.count()
    for letter in shape:
        match letter:
            case "s" | "u" | "a":
                probe.messages.append(Message(_ROLES[letter], (mark(),)))
            case "c":
                probe.messages.append(Message("assistant", (call(),)))
            case "C":
                probe.messages.append(Message("assistant", (call(), call())))
            case "t" | "T":
                reasoning = (ReasoningPart("reasoning"),) if letter == "T" else ()
                probe.messages.append(Message("assistant", (*reasoning, mark(), call())))
            case "y" | "x":
                probe.messages.append(Message(_ROLES[letter], (TextPart(""),)))
            case _:
                text = TextPart("") if letter == "z" else mark()
                if letter in ("o", "n"):
                    result = ToolResultPart("call_unknown", (text,), PROBE_NAMES[0] if letter == "n" else None)
                else:
                    called = waiting.pop(-1 if letter == "R" else 0)
                    result = ToolResultPart(called.call_id, (text,))
                    probe.called[text.text] = called.name
                probe.messages.append(Message("tool", (result,)))
    return probe


_ROLES: dict[str, Role] = {"s": "system", "u": "user", "y": "user", "a": "assistant", "x": "assistant"}


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """The rules, for one conversation. A rule returns the messages."""

    turns: Turns
    has_tools: bool
    continues: bool
    hides_system: bool = False  # the template shows no system message to this conversation

    def run(self, messages: Sequence[Message]) -> Placed:
        rules = (
            ("one call a turn", self.pair_calls),
            ("system messages", self.place_system),
            ("results without a call", self.place_results),
            ("text beside calls", self.place_texts),
            ("a user's turn", self.begin_with_user),
            ("order of turns", self.order),
            ("empty messages", self.fill),
        )
        placed, changed = list(messages), []
        for name, rule in rules:
            before, placed = placed, rule(placed)
            if placed != before:
                changed.append(name)
        return Placed(tuple(placed), tuple(changed))

    def _takes(self, shape: str) -> bool:
        return self.turns.takes(shape, self.has_tools)

    def place_system(self, messages: list[Message]) -> list[Message]:
        """Turn system messages that are not taken in their place into text of the message next to them."""
        num_leading = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
        leading, rest = messages[:num_leading], messages[num_leading:]
        if leading and (self.hides_system or not self.turns.takes("su", None)):
            return _merged(leading, rest)
        if num_leading > 1 and not self.turns.takes("ssu", None):
            leading = [Message("system", tuple(part for message in leading for part in message.parts))]
        if any(message.role == "system" for message in rest) and not self.turns.takes("susausau", None):
            rest = _merged([], rest)
        return [*leading, *rest]

    def loses_system(self, placed: Placed) -> bool:
        """Whether the template shows the first message only to a last question, and the conversation ends otherwise."""
        if placed.messages[:1] == () or placed.messages[0].role != "system":
            return False
        shape = _LAST.get(_letter(placed.messages[-1]), "")
        return bool(shape) and not self._takes(f"s{shape}") and self._takes(shape)

    def place_results(self, messages: list[Message]) -> list[Message]:
        """Give results that do not follow their call to the user."""
        placed: list[Message] = []
        called: set[str] = set()  # all calls so far
        current: set[str] = set()  # the calls whose results may follow
        for message in messages:
            before, calls = _letter(placed[-1]) if placed else "", {call.call_id for call in _calls(message)}
            if _letter(message) == "r":
                call_id = _call_id(message)
                shape = (_LATE if call_id in called else _UNKNOWN).get(before, "")
                if any(part.name for part in message.parts if isinstance(part, ToolResultPart)):
                    shape = shape.replace("o", "n")
                if call_id not in current and not self._takes(shape):
                    message, current = as_user(message), set()
            else:
                current = current | calls if before == "c" and calls else calls
            called |= calls
            placed.append(message)
        return placed

    def pair_calls(self, messages: list[Message]) -> list[Message]:
        """Give each call a message of its own, which its results follow, where several in a turn are not taken."""
        placed: list[Message] = []
        runs = [list(run) for _, run in itertools.groupby(messages, _letter)]
        for before, run, behind in zip([[], *runs], runs, [*runs[1:], []], strict=False):
            if _letter(run[0]) == "c":
                placed += self._paired(run, behind if behind and _letter(behind[0]) == "r" else [])
            elif not before or _letter(before[0]) != "c" or _letter(run[0]) != "r":
                placed += run
        return placed

    def _paired(self, asked: list[Message], results: list[Message]) -> list[Message]:
        order = [call.call_id for message in asked for call in _calls(message)]
        places = _places(order, results)
        are_taken = len(order) == len(asked) or self._takes("uCrrau")
        if are_taken and (len(asked) == 1 or not results or self._takes("uccrrau")):
            if places != sorted(places) and not self._takes("uCRrau"):
                results = [results[index] for index in sorted(range(len(places)), key=places.__getitem__)]
            return [*asked, *results]
        placed: list[Message] = []
        num_calls = 0
        for message in asked:
            said = tuple(part for part in message.parts if not isinstance(part, ToolCallPart))
            for call in _calls(message):
                placed.append(replace(message, parts=(*said, call)))
                placed += [result for result, place in zip(results, places, strict=True) if place == num_calls]
                num_calls, said = num_calls + 1, ()
        return [*placed, *(result for result, place in zip(results, places, strict=True) if place == num_calls)]

    def place_texts(self, messages: list[Message]) -> list[Message]:
        """Write the text of a message with calls before it, where the template writes only the calls."""
        placed: list[Message] = []
        lost = self._lost_texts(messages)
        for number, message in enumerate(messages):
            if _letter(message) == "c" and placed and _letter(placed[-1]) == "a" and not self._takes("uacr"):
                message = _joined(placed.pop(), message)
            if number in lost:
                self._say(placed, Message("assistant", tuple(p for p in message.parts if isinstance(p, TextPart))))
                message = replace(message, parts=tuple(p for p in message.parts if not isinstance(p, TextPart)))
            placed.append(message)
        return placed

    def _lost_texts(self, messages: list[Message]) -> set[int]:
        """Find the messages with calls whose text is lost. Some templates lose it once a reply without calls follows."""
        lost: set[int] = set()
        is_reply_later = False
        for number, message in reversed(list(enumerate(messages))):
            if _letter(message) == "c" and not _is_blank(message.parts):
                has_reasoning = any(isinstance(part, ReasoningPart) for part in message.parts)
                if not self._takes(f"u{'T' if has_reasoning else 't'}r{'au' * is_reply_later}"):
                    lost.add(number)
                    is_reply_later = True
            is_reply_later |= _letter(message) == "a"
        return lost

    def _say(self, placed: list[Message], said: Message) -> None:
        """Add a text of the assistant that calls follow. It joins the message before if turns alternate strictly."""
        before = _letter(placed[-1]) if placed else ""
        text = TextPart(SAID.format("".join(part.text for part in said.parts if isinstance(part, TextPart))))
        if before not in ("u", "r") or self._takes("uacrau"):
            placed.append(said)
        else:
            placed[-1] = _with_text(placed[-1], (text,))

    def begin_with_user(self, messages: list[Message]) -> list[Message]:
        """Begin with an empty turn of the user, where the template demands one."""
        num_leading = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
        first = _letter(messages[num_leading]) if num_leading < len(messages) else ""
        has_user = any(message.role == "user" for message in messages)
        shape = f"{'s' * min(num_leading, 2)}{_FIRST.get(first, '')}{'u' * has_user}"
        if first == "u" or not shape or self._takes(shape):
            is_later = any(message.role == "assistant" for message in messages)
            if has_user or is_later or not self.has_tools or not shape or self.turns.shows_tools(shape):
                return messages
        return [*messages[:num_leading], NO_TEXT, *messages[num_leading:]]

    def order(self, messages: list[Message]) -> list[Message]:
        """Join turns of one role, or put a turn between them, where user and assistant must take turns."""
        placed: list[Message] = []
        last = ""  # the last turn that is text
        for message in messages:
            letter, before = _letter(message), _letter(placed[-1]) if placed else ""
            shape, mended = _NEIGHBOURS.get(last + before + letter, ("", ""))
            if not shape or self._takes(shape) or not self._takes(mended):
                placed.append(message)
            elif letter == before and letter != "c":
                placed[-1] = _joined(placed[-1], message)
            elif before == "r" and letter == "u" and not any(isinstance(part, MediaPart) for part in message.parts):
                placed[-1] = _with_text(placed[-1], message.parts)
            else:
                placed += [Message("assistant", (FILLER,)) if letter == "u" else NO_TEXT, message]
            last = letter if letter in ("u", "a") else last
        return placed

    def fill(self, messages: list[Message]) -> list[Message]:
        """Give empty messages a text, where they are refused."""
        placed = list(messages)
        for number, message in enumerate(messages):
            shape = _EMPTY.get(_letter(message))
            is_continued = self.continues and number == len(messages) - 1
            if shape and not is_continued and _is_blank(message.parts) and not self._takes(shape):
                placed[number] = _with_text(message, (FILLER,))
        return placed


# Shapes that show whether a rule is needed
_UNKNOWN = {"": "ou", "s": "sou", "u": "uoau", "a": "uaou", "c": "ucoau", "r": "ucroau"}  # by the message before
_LATE = {"s": "ucurau", "u": "ucurau", "a": "ucaru", "c": "ucucrRau", "r": "ucucRrau"}
_FIRST = {"a": "a", "c": "cr", "r": "o"}
_LAST = {"a": "ua", "c": "uc", "r": "ucr"}
_SAMPLES = ("suusau", "uoau", "uCrrau", "utrau", "crau", "cr", "uuaaucruau", "uxuy")
_EMPTY = {"u": "y", "a": "uxu", "r": "ucz"}
_NEIGHBOURS = {  # by the last turn that is text, the message before, and the message: the shape, and the shape mended
    "uuu": ("uuauu", "uau"), "aaa": ("uaau", "uau"), "uru": ("ucruau", "ucrau"), "ucu": ("ucuau", "ucauau"),
    "ara": ("uacrau", "uacryau"), "aca": ("uacau", "uacyau"), "uca": ("ucau", "ucyau"), "ucc": ("uccR", "ucycR"),
    "acc": ("uccR", "ucycR"), "ra": ("crau", "cryau"), "ca": ("cau", "cyau"),
}  # fmt: skip


def _letter(message: Message) -> str:
    """The message's letter in a shape."""
    return "c" if _calls(message) else "r" if message.role == "tool" else message.role[0]


def _calls(message: Message) -> list[ToolCallPart]:
    return [part for part in message.parts if isinstance(part, ToolCallPart)]


def _call_id(message: Message) -> str:
    return next((part.call_id for part in message.parts if isinstance(part, ToolResultPart)), "")


def _places(order: Sequence[str], results: Sequence[Message]) -> list[int]:
    """The index of each result's call among ids that may occur twice; `len(order)` for a result without a call."""
    waiting = list(enumerate(order))
    places = []
    for result in results:
        found = next((entry for entry in waiting if entry[1] == _call_id(result)), None)
        if found is not None:
            waiting.remove(found)
        known = order.index(_call_id(result)) if _call_id(result) in order else len(order)
        places.append(known if found is None else found[0])
    return places


def _is_blank(parts: Sequence[Part]) -> bool:
    """Whether no text and no image is shown."""
    for part in parts:
        if isinstance(part, ToolResultPart) and not _is_blank(part.content):
            return False
        if isinstance(part, MediaPart) or (isinstance(part, TextPart) and part.text.strip()):
            return False
    return True


def _joined(one: Message, other: Message) -> Message:
    reasoning = [part for part in (*one.parts, *other.parts) if isinstance(part, ReasoningPart)]
    first, second = ([p for p in message.parts if not isinstance(p, ReasoningPart)] for message in (one, other))
    return replace(one, parts=(*reasoning, *_behind(first, second)))


def _with_text(message: Message, parts: Sequence[Part]) -> Message:
    """Add parts behind those of a message, or inside its result."""
    *others, last = message.parts or (TextPart(""),)
    if isinstance(last, ToolResultPart):
        shown = [part for part in parts if isinstance(part, TextPart)]
        return replace(message, parts=(*others, replace(last, content=_behind(last.content, shown))))
    return replace(message, parts=_behind(message.parts, parts))


def _behind(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """Put parts behind others. A blank line separates texts that meet."""
    if not first or not second or not (isinstance(first[-1], TextPart) and isinstance(second[0], TextPart)):
        return (*first, *second)
    text = "\n\n".join(filter(None, (first[-1].text, second[0].text)))
    return (*first[:-1], TextPart(text), *second[1:])


def _merged(leading: Sequence[Message], rest: Sequence[Message]) -> list[Message]:
    merging = _Merging()
    for message in leading:
        merging.feed_system(_text(message, "{}"))
    for message in rest:
        if message.role == "system":
            merging.feed_system(_text(message, REMINDER))
        else:
            merging.feed(message)
    return merging.finish()


class _Merging:
    """Adds system texts to the end of the user message or tool result before them, or to the start of the next."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._waiting: list[TextPart] = []

    def feed_system(self, part: TextPart) -> None:
        if not part.text:
            return
        last = self._messages[-1] if self._messages and not self._waiting else None
        match last:
            case Message(role="user" | "tool") if last.parts:
                self._messages[-1] = replace(last, parts=(*last.parts[:-1], *_extended(last.parts[-1], part)))
            case _:
                self._waiting.append(part)

    def feed(self, message: Message) -> None:
        if self._waiting and message.role == "user":
            message = replace(message, parts=(*self._waiting, *message.parts))
            self._waiting = []
        self._flush()
        self._messages.append(message)

    def finish(self) -> list[Message]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        if self._waiting:
            self._messages.append(Message("user", tuple(self._waiting)))
            self._waiting = []


def _extended(part: Part, text: TextPart) -> tuple[Part, ...]:
    if isinstance(part, ToolResultPart):
        return (replace(part, content=(*part.content, text)),)
    return (part, text)


def _text(message: Message, form: str) -> TextPart:
    text = "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
    return TextPart(form.format(text) if text else "")
