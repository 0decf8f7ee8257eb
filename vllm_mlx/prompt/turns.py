"""Rewrites conversations for a template that cannot write them whole, and only where it cannot."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.messages import MediaPart, Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from .echo import calls_of
from .shapes import Probe, Shapes
from .template_messages import as_user

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # the form that Claude Code uses for older models
SAID = "<assistant>\n{}\n</assistant>"  # a text of the assistant that no turn of the assistant can hold
FILLER = TextPart("...")  # the text of a message that must not be empty
NO_TEXT = Message("user", (TextPart(""),))

# Shapes that show whether a rule is needed
_UNKNOWN = {"": "ou", "s": "sou", "u": "uoau", "a": "uaou", "c": "ucoau", "r": "ucroau"}  # by the message before
_LATE = {"s": "ucurau", "u": "ucurau", "a": "ucaru"}  # the result of the last call
_LATER = {"s": "uccurau", "u": "uccurau", "a": "uccaru", "c": "ucucrRau", "r": "ucucRrau"}  # of one before
_FIRST = {"a": "a", "c": "cr", "r": "o"}
_LAST = {"a": "ua", "c": "uc", "r": "ucr"}
_EMPTY = {"u": ("y", "u"), "a": ("uxu", "uau"), "r": ("ucz", "ucr")}
_NEIGHBOURS = {  # by the last turn that is text, the message before, and the message: the shape, and the shape mended
    "uuu": ("uuauu", "uau"), "aaa": ("uaau", "uau"), "uru": ("ucruau", "ucrau"), "ucu": ("ucuau", "ucauau"),
    "ara": ("uacrau", "uacryau"), "aca": ("uacau", "uacyau"), "uca": ("ucau", "ucyau"), "ucc": ("uccR", "ucycR"),
    "acc": ("uccR", "ucycR"), "ra": ("crau", "cryau"), "ca": ("cau", "cyau"),
}  # fmt: skip
_SAMPLES = ("suusau", "uoau", "uCrrau", "utrau", "crau", "cr", "uuaaucruau", "uxuy")


@dataclass(frozen=True, slots=True)
class Turns:
    """Changes messages that the template refuses, loses or moves. A rule takes messages and returns messages.

    Where the template allows it, a rule needs only the messages before the place that it changes, so the prompt still
    begins with the prompt of the messages before. The shapes are probed when they first matter.
    """

    shapes: Shapes
    has_tools: bool
    continues: bool = False  # the reply continues the last message
    hides_system: bool = False  # the template shows no first system message to this conversation

    def place(self, messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
        """Return a conversation that the template writes whole, and the names of the rules that changed it.

        `messages`: each tool result as a separate message.
        """
        rules: tuple[tuple[str, Callable[[list[Message]], list[Message]]], ...] = (
            ("one call a turn", self._pair_calls),
            ("system messages", self._place_system),
            ("one call a turn", self._pair_calls),  # again, for results behind a system message or further calls
            ("results without a call", self._place_results),
            ("images in results", self._place_images),
            ("text beside calls", self._place_texts),
            ("a user's turn", self._begin_with_user),
            ("order of turns", self._order),
            ("empty messages", self._fill),
        )
        placed, changed = list(messages), []
        for name, rule in rules:
            before, placed = placed, rule(placed)
            if placed != before:
                changed.append(name)
        if self._loses_system(placed):
            return replace(self, hides_system=True).place(messages)
        return placed, tuple(dict.fromkeys(changed))

    def needs(self) -> tuple[str, ...]:
        """Return the rules that the template needs for any conversation."""
        samples = (self.place(Probe(shape).messages)[1] for shape in _SAMPLES)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(samples)))

    def _takes(self, shape: str) -> bool:
        return self.shapes.takes(shape, self.has_tools)

    def _lacks(self, shape: str, mended: str) -> bool:
        """Return whether the template takes only the mended shape. If it takes neither, a rule does not help."""
        return not self._takes(shape) and self._takes(mended)

    def _pair_calls(self, messages: list[Message]) -> list[Message]:
        """Give each call a separate message, which its result follows, if the template refuses several in a turn."""
        placed: list[Message] = []
        runs = [list(run) for _, run in itertools.groupby(messages, _letter)]
        for before, run, behind in zip([[], *runs], runs, [*runs[1:], []], strict=False):
            if _letter(run[0]) == "c":
                placed += self._paired(run, behind if behind and _letter(behind[0]) == "r" else [])
            elif not before or _letter(before[0]) != "c" or _letter(run[0]) != "r":
                placed += run
        return placed

    def _paired(self, asked: list[Message], results: list[Message]) -> list[Message]:
        """`results`: those that follow the calls."""
        pairs: list[Message] = []
        waiting = list(results)
        for message in asked:
            said = tuple(part for part in message.parts if not isinstance(part, ToolCallPart))
            for call in calls_of(message):
                pairs.append(replace(message, parts=(*said, call)))
                found = [number for number, result in enumerate(waiting) if _call_id(result) == call.call_id][:1]
                pairs += map(waiting.pop, found)
                said = ()
        if not self._takes_calls(asked, results):
            return [*pairs, *waiting]
        in_order = [*(message for message in pairs if _letter(message) == "r"), *waiting]
        is_moved = results != in_order and self._lacks("uCRrau", "uCrrau")
        return [*asked, *(in_order if is_moved else results)]

    def _takes_calls(self, asked: list[Message], results: list[Message]) -> bool:
        if any(len(calls_of(message)) > 1 for message in asked) and self._lacks("uCrrau", "ucrcrau"):
            return False
        return len(asked) == 1 or not results or not self._lacks("uccrrau", "ucrcrau")

    def _place_system(self, messages: list[Message]) -> list[Message]:
        """Turn system messages that are not taken in their place into text of the message next to them.

        None moves to the front. The probes have no tools, as prompts of templates that demand tools always had them.
        """
        num_leading = _num_leading(messages)
        leading, rest = messages[:num_leading], messages[num_leading:]
        if leading and (self.hides_system or not self.shapes.takes("su", None)):
            return _merged(messages, num_leading)
        if num_leading > 1 and not self.shapes.takes("ssu", None):
            leading = [Message("system", tuple(part for message in leading for part in message.parts))]
        if any(message.role == "system" for message in rest) and not self.shapes.takes("susausau", None):
            rest = _merged(rest)
        return [*leading, *rest]

    def _loses_system(self, placed: list[Message]) -> bool:
        """Return whether the template shows the first message only to a last question, which this is not."""
        shape = _LAST.get(_letter(placed[-1])) if _num_leading(placed) else None
        return shape is not None and self._lacks(f"s{shape}", shape)

    def _place_results(self, messages: list[Message]) -> list[Message]:
        """Give results that do not follow their call to the user."""
        placed: list[Message] = []
        called: set[str] = set()  # all calls so far
        current: set[str] = set()  # the calls whose results may follow
        latest, since = "", set[str]()  # the last call, the letters since then
        for message in messages:
            before, calls = _letter(placed[-1]) if placed else "", [call.call_id for call in calls_of(message)]
            call_id = _call_id(message)
            if calls:
                current, since, latest = current.union(calls) if before == "c" else set(calls), set(), calls[-1]
                called.update(calls)
            elif _letter(message) != "r":
                current, since = set(), since | {_letter(message)}
            elif call_id not in current:
                shapes = [
                    _UNKNOWN[before].replace("o", "n" if any(result.name for result in _results(message)) else "o")
                ]
                if call_id in called:
                    late = _LATE if call_id == latest else _LATER
                    shapes = [late.get(letter, "u") for letter in since or before]
                if any(self._lacks(shape, "uau") for shape in shapes):
                    message, current = as_user(message), set()
            placed.append(message)
        return placed

    def _place_images(self, messages: list[Message]) -> list[Message]:
        """Show the images of results in a turn of the user behind the results, where results show none."""
        placed: list[Message] = []
        waiting: list[Message] = []
        for message in [*messages, NO_TEXT]:
            if _letter(message) != "r":
                placed += waiting
                waiting = []
            images = [part for result in _results(message) for part in result.content if isinstance(part, MediaPart)]
            if images and self._lacks("uci", "ucr"):
                [result] = _results(message)
                others = tuple(part for part in result.content if not isinstance(part, MediaPart))
                waiting.append(as_user(Message("tool", (ToolResultPart(result.call_id, tuple(images)),))))
                message = replace(message, parts=(replace(result, content=others),))
            placed.append(message)
        return placed[:-1]

    def _place_texts(self, messages: list[Message]) -> list[Message]:
        """Write the text of a message with calls before it, where the template writes only the calls."""
        placed: list[Message] = []
        lost = self._lost_texts(messages)
        for number, message in enumerate(messages):
            while _letter(message) == "c" and placed and _letter(placed[-1]) == "a" and self._lacks("uacr", "ucr"):
                message = _joined(placed.pop(), message)
            if number in lost:
                self._say(placed, Message("assistant", tuple(p for p in message.parts if isinstance(p, TextPart))))
                message = replace(message, parts=tuple(p for p in message.parts if not isinstance(p, TextPart)))
            placed.append(message)
        return placed

    def _lost_texts(self, messages: list[Message]) -> set[int]:
        """Find messages with calls whose text is lost. Some templates lose it once a reply without calls follows."""
        lost: set[int] = set()
        is_reply_later = False
        for number, message in reversed(list(enumerate(messages))):
            if _letter(message) == "c" and not _is_blank(message.parts):
                has_reasoning = any(isinstance(part, ReasoningPart) for part in message.parts)
                if self._lacks(f"u{'T' if has_reasoning else 't'}r{'au' * is_reply_later}", "ucrau"):
                    lost.add(number)
                    is_reply_later = True
            is_reply_later |= _letter(message) == "a"
        return lost

    def _say(self, placed: list[Message], said: Message) -> None:
        """Add a text of the assistant that calls follow. It joins the message before if turns alternate strictly."""
        text = TextPart(SAID.format("".join(part.text for part in said.parts if isinstance(part, TextPart))))
        if not placed or _letter(placed[-1]) not in ("u", "r") or self._takes("uacrau"):
            placed.append(said)
        else:
            placed[-1] = _with_text(placed[-1], (text,))

    def _begin_with_user(self, messages: list[Message]) -> list[Message]:
        """Begin with an empty turn of the user, where the template demands one."""
        num_leading = _num_leading(messages)
        first = _letter(messages[num_leading]) if num_leading < len(messages) else ""
        has_user = any(message.role == "user" for message in messages)
        leading, rest = "s" * min(num_leading, 2), _FIRST.get(first, "")
        shape, mended = f"{leading}{rest}{'u' * has_user}", (f"{leading}y{rest}", f"{leading}y{rest}u")
        if first == "u" or not shape:
            return messages
        # Templates that show tools only to a question do so in later turns.
        must_show_tools = self.has_tools and all(message.role == "system" for message in messages)
        is_taken = not any(self._lacks(shape, other) for other in mended)
        if is_taken and not (must_show_tools and not self.shapes.shows_tools(shape)):
            return messages
        return [*messages[:num_leading], NO_TEXT, *messages[num_leading:]]

    def _order(self, messages: list[Message]) -> list[Message]:
        """Join turns of one role, or put a turn between them, where user and assistant must take turns."""
        placed: list[Message] = []
        last = before = ""  # the last turn that is text; the last one that is not of the system
        for message in messages:
            letter = _letter(message)
            behind = _letter(placed[-1]) if placed else ""
            shapes = _NEIGHBOURS.get(last + before + letter)
            if shapes is None or not self._lacks(*shapes):
                placed.append(message)
            elif letter == behind != "c":
                placed[-1] = _joined(placed[-1], message)
            elif letter == "u" and behind == "r" and not any(isinstance(part, MediaPart) for part in message.parts):
                placed[-1] = _with_text(placed[-1], message.parts)
                letter = "r"
            else:
                placed += [Message("assistant", (FILLER,)) if letter == "u" else NO_TEXT, message]
            before = before if letter == "s" else letter
            last = letter if letter in ("u", "a") else last
        return placed

    def _fill(self, messages: list[Message]) -> list[Message]:
        """Give empty messages a text, where they are refused."""
        placed = list(messages)
        for number, message in enumerate(messages):
            is_continued = self.continues and number == len(messages) - 1
            shapes = _EMPTY.get(_letter(message))
            if shapes and not is_continued and _is_blank(message.parts) and self._lacks(*shapes):
                placed[number] = _with_text(message, (FILLER,))
        return placed


def _letter(message: Message) -> str:
    """Return the message's letter in a shape."""
    return "c" if calls_of(message) else "r" if message.role == "tool" else message.role[0]


def _num_leading(messages: Sequence[Message]) -> int:
    return next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))


def _results(message: Message) -> list[ToolResultPart]:
    return [part for part in message.parts if isinstance(part, ToolResultPart)]


def _call_id(message: Message) -> str:
    return next((result.call_id for result in _results(message)), "")


def _is_blank(parts: Sequence[Part]) -> bool:
    """Return whether no text and no image is shown."""
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


def _merged(messages: Sequence[Message], num_plain: int = 0) -> list[Message]:
    """Add system texts to the end of the user message or tool result before them, or to the start of the next.

    The first `num_plain` texts are written as they are, and others as reminders.
    """
    merged: list[Message] = []
    waiting: tuple[TextPart, ...] = ()
    for number, message in enumerate(messages):
        if message.role != "system":
            if waiting and message.role == "user":
                message = replace(message, parts=(*waiting, *message.parts))
            elif waiting:
                merged.append(Message("user", waiting))
            merged.append(message)
            waiting = ()
        elif text := "\n".join(part.text for part in message.parts if isinstance(part, TextPart)):
            part = TextPart(text if number < num_plain else REMINDER.format(text))
            if not waiting and merged and merged[-1].role in ("user", "tool") and merged[-1].parts:
                *others, last = merged[-1].parts
                end = (
                    (replace(last, content=(*last.content, part)),)
                    if isinstance(last, ToolResultPart)
                    else (last, part)
                )
                merged[-1] = replace(merged[-1], parts=(*others, *end))
            else:
                waiting = (*waiting, part)
    return [*merged, Message("user", waiting)] if waiting else merged
