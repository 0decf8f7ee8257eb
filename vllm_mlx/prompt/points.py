"""Where a prompt is worth keeping for later ones. Asks the template by rendering, so its quirks cannot fool it."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..core.deadline import Deadline
from ..core.errors import TemplateError
from ..core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from ..core.request import Request
from .encoded import Encoded
from .template import ChatTemplate

Point = tuple[int, int]  # (characters, tokens)

_NEAR = 8  # tokens: fewer are sooner computed again than a copy of recurrent state is held


class SnapshotPoints:
    def __init__(self, template: ChatTemplate):
        self._template = template

    def plan(self, request: Request, encoded: Encoded, deadline: Deadline | None = None) -> tuple[Point, ...]:
        """Where later prompts are likely to part from this one.

        The ends of tools + system, of the conversation before its last question, of what that says, and of all of it
        before the generation suffix; and where sessions of one agent part. `encoded` is the request's prompt. A point
        that the template lets nobody ask for is left out. Raises what the deadline raises.
        """
        points: set[Point | None] = set()
        for probes in self._probes(request):
            if deadline is not None:
                deadline.check()
            points.add(self._common(probes, encoded))
        points |= {encoded.before_space(encoded.boundary(place)) for place in volatile_places(request, encoded.text)}
        return tuple(_apart(sorted(point for point in points if point and 0 < point[1] < len(encoded.token_ids))))

    def _probes(self, request: Request) -> Iterator[Sequence[Request]]:
        yield from without_conversation(request)
        yield from before_last_question(request)
        yield from with_more_said(request)
        yield from with_next_turn(request)

    def _common(self, probes: Sequence[Request], encoded: Encoded) -> Point | None:
        """What all of the probes have in common with the prompt."""
        try:
            return encoded.before_space(min(encoded.common(self._template.render(probe)) for probe in probes))
        except TemplateError:
            return None


def _apart(points: Iterable[Point]) -> Iterator[Point]:
    """Without those that the one a few tokens before them serves as well."""
    last = -_NEAR
    for point in points:
        if point[1] - last >= _NEAR:
            last = point[1]
            yield point


# Two texts that differ from the first character on: no conversation can share a start with both. The word takes a
# space before it into its token, as words do and digits do not.
_TEXTS = ("0 or not", "the")


def without_conversation(request: Request) -> Iterator[tuple[Request, ...]]:
    """A pair that shares only tools and the system messages at its start with the request."""
    assert request.messages is not None
    system = tuple(itertools.takewhile(lambda message: message.role == "system", request.messages))
    yield tuple(_asking(request, (*system, _user(text))) for text in _TEXTS)


def before_last_question(request: Request) -> Iterator[tuple[Request, ...]]:
    """A pair that asks something else in its place: clients go back a turn to summarise, edit or try again."""
    assert request.messages is not None
    asked = [number for number, message in enumerate(request.messages) if message.role == "user"]
    if asked and any(message.role == "assistant" for message in request.messages[: asked[-1]]):
        yield tuple(_asking(request, (*request.messages[: asked[-1]], _user(text))) for text in _TEXTS)


def with_more_said(request: Request) -> Iterator[tuple[Request, ...]]:
    """The last question goes on, or one follows the last result: what is said before the reply began."""
    assert request.messages is not None
    if request.continue_final_message or not request.messages:
        return
    *before, last = request.messages
    if last.role == "user":
        yield (_asking(request, (*before, replace(last, parts=(*last.parts, TextPart(_TEXTS[1]))))),)
    elif last.role == "tool":
        yield (_asking(request, (*request.messages, _user(_TEXTS[1]))),)


def with_next_turn(request: Request) -> Iterator[tuple[Request, ...]]:
    """Pairs in which the conversation goes on: with a reply and a question, then with a call and its result."""
    assert request.messages is not None
    if request.continue_final_message or not request.messages or request.messages[-1].role == "assistant":
        return
    replies = (
        Message("assistant", (TextPart(_TEXTS[0]),)),
        Message("assistant", (ReasoningPart(_TEXTS[1]), TextPart(_TEXTS[1]))),
    )
    yield tuple(_asking(request, (*request.messages, reply, _user("?"))) for reply in replies)
    if request.tools and request.tool_choice.mode != "none":
        call = ToolCallPart("call_000000000000000000000000", request.tools[0].name, {})
        replies = (
            Message("assistant", (call,)),
            Message("assistant", (ReasoningPart(_TEXTS[1]), TextPart(_TEXTS[1]), call)),
        )
        result = _result(call, "?")
        yield tuple(_asking(request, (*request.messages, reply, result)) for reply in replies)


def after_reply(request: Request, reply: Message, sentinel: str) -> Iterator[Request]:
    """The request that can follow: with the reply's reasoning, then without; results of its calls, else a question.

    `reply`: the whole message, where the request asked to go on with one.
    """
    assert request.messages is not None
    calls = [part for part in reply.parts if isinstance(part, ToolCallPart)]
    follow = tuple(_result(call, sentinel) for call in calls) or (_user(sentinel),)
    before = request.messages[:-1] if request.continue_final_message else request.messages
    yield _asking(request, (*before, reply, *follow))
    if any(isinstance(part, ReasoningPart) for part in reply.parts):
        plain = tuple(part for part in reply.parts if not isinstance(part, ReasoningPart))
        yield _asking(request, (*before, Message("assistant", plain), *follow))


def _asking(request: Request, messages: tuple[Message, ...]) -> Request:
    return replace(request, messages=messages, add_generation_prompt=True, continue_final_message=False)


def _user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def _result(call: ToolCallPart, text: str) -> Message:
    return Message("tool", (ToolResultPart(call.call_id, (TextPart(text),), call.name),))


MAX_PLACES = 3
MIN_GAP = 1000  # characters between places: about what a copy of recurrent state is worth
_CONTEXT = 32  # characters before a place by which it is found again in the rendered prompt
# The absolute path of somebody's folder, or a date: working directories, memory files, "today is".
_VARYING = re.compile(
    r"(?<![\w./~-])/(?:Users|home|root|private|tmp|var|Volumes|mnt|workspaces?)/[\w.-]+|\b\d{4}-\d{2}-\d{2}\b"
)


def volatile_places(request: Request, text: str) -> list[int]:
    """Offsets in the request's rendered `text`, ascending, before which sessions of one agent are likely the same."""
    places: list[int] = []
    for before, found in _varying(request):
        start = text.find(before + found, places[-1] if places else 0)
        if start < 0 or (places and start + len(before) < places[-1] + MIN_GAP):
            continue
        places.append(start + len(before))
        if len(places) == MAX_PLACES:
            break
    return places


def _varying(request: Request) -> Iterator[tuple[str, str]]:
    """What varies in the messages before the first reply, and the text before it."""
    assert request.messages is not None
    for message in request.messages:
        if message.role == "assistant":
            return
        for part in message.parts:
            if isinstance(part, TextPart):
                for match in _VARYING.finditer(part.text):
                    yield part.text[max(0, match.start() - _CONTEXT) : match.start()], match.group()
