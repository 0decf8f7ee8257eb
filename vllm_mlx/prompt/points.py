"""Snapshot points: places in a prompt whose state later prompts are likely to reuse.

Rendering probes, conversations that are never sent to a model, shows where a template puts things.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..core.errors import TemplateError
from ..core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from ..core.request import Request
from ..util.tasks import Deadline
from .encoded import EncodedText, common_prefix
from .remembered import Boundary
from .template import ChatTemplate
from .volatile import volatile_places

Probes = Sequence[Request]

_NEAR = 8  # tokens: computing fewer again costs less than a copy of recurrent state
_MAX_PLACES = 4  # points where sessions part, in addition to those that follow from the prompt's structure
_MIN_GAP = 1000  # characters before such a point
# Two texts that differ from the first character on: no conversation can share a start with both. The word takes a
# space before it into its token, as words do and digits do not.
_TEXTS = ("0 or not", "the")


def plan_points(
    template: ChatTemplate, request: Request, encoded: EncodedText, deadline: Deadline
) -> tuple[Boundary, ...]:
    """Return the places where later prompts are likely to differ from this one, ascending. `encoded`: this prompt.

    They are the ends of the tools with the system prompt, of the conversation before its last question, of the last
    question, and of the conversation before the generation prompt; and the places at which the sessions of an agent
    part. A point is left out if the template refuses its probes. Raises the deadline's error.
    """
    points: set[Boundary] = set()
    for probes in _all_probes(request):  # nine renderings at most, in addition to the prompt's own
        deadline.check()
        if (point := _common(template, probes, encoded)) is not None:
            points.add(point)
    deadline.check()
    _add_places(points, _session_places(template, request, encoded.text), encoded)
    return tuple(_distant(sorted(point for point in points if 0 < point.num_tokens < len(encoded.token_ids))))


def conversation_end(template: ChatTemplate, request: Request, encoded: EncodedText) -> tuple[Boundary, ...]:
    """Return the end of the conversation before the generation prompt, which two short conversations show.

    Return nothing if the template refuses them.
    """
    question, following = (_user_message(text) for text in _TEXTS)
    probes = ((question,), (question, Message("assistant", (TextPart(_TEXTS[1]),)), following))
    try:
        short, longer = (template.probe(replace(_with_messages(request, probe), tools=())) for probe in probes)
    except TemplateError:
        return ()
    suffix = short[common_prefix(short, longer) :]
    num_chars = common_prefix(suffix[::-1], encoded.text[: -len(suffix) - 1 : -1])
    return (encoded.before_space(encoded.boundary_before(len(encoded.text) - num_chars)),)


def _common(template: ChatTemplate, probes: Probes, encoded: EncodedText) -> Boundary | None:
    """Return the end of the text that all of the probes share with the prompt."""
    try:
        return encoded.before_space(min(encoded.common_with(template.probe(probe)) for probe in probes))
    except TemplateError:
        return None


def _add_places(points: set[Boundary], places: Iterable[int], encoded: EncodedText) -> None:
    """Add a point before each of the first places that are far enough from the point before them."""
    most = len(points) + _MAX_PLACES
    for place in places:
        if place - max((point.num_chars for point in points if point.num_chars <= place), default=0) >= _MIN_GAP:
            points.add(encoded.before_space(encoded.boundary_before(place)))
            if len(points) == most:
                return


def _session_places(template: ChatTemplate, request: Request, text: str) -> Iterator[int]:
    """Yield offsets in the prompt's `text`, all before its first reply: the first question, then volatile places."""
    assert request.messages is not None
    first = tuple(itertools.takewhile(lambda message: message.role != "assistant", request.messages))
    end = len(text)
    if first != request.messages:
        try:
            end = common_prefix(text, template.probe(_with_messages(request, first)))
        except TemplateError:
            return
    said = [part for message in first if message.role == "user" for part in message.parts]
    if len(said) > 1 and isinstance(said[-1], TextPart) and (question := said[-1].text.strip()):
        yield max(0, text.rfind(question, 0, end))
    yield from volatile_places(text, end)


def _distant(points: Iterable[Boundary]) -> Iterator[Boundary]:
    """Leave out points that are only a few tokens after another one."""
    last = -_NEAR
    for point in points:
        if point.num_tokens - last >= _NEAR:
            last = point.num_tokens
            yield point


# Probes


def _all_probes(request: Request) -> Iterator[Probes]:
    """Yield nine requests at most, alone or in pairs, which share a start with a later prompt's."""
    messages = request.messages or ()
    # Only the tools and the leading system messages are shared.
    yield _with_questions(request, tuple(itertools.takewhile(lambda message: message.role == "system", messages)))
    asked = [number for number, message in enumerate(messages) if message.role == "user"]
    if asked and any(message.role == "assistant" for message in messages[: asked[-1]]):
        yield _with_questions(request, messages[: asked[-1]])  # clients summarize, edit or try the last question again
    if messages and not request.continue_final_message:
        yield from _with_more_said(request, messages)
        yield from _with_next_turn(request, messages)


def _with_questions(request: Request, messages: tuple[Message, ...]) -> Probes:
    return tuple(_with_messages(request, (*messages, _user_message(text))) for text in _TEXTS)


def _with_more_said(request: Request, messages: tuple[Message, ...]) -> Iterator[Probes]:
    """Yield a probe with a longer last question, or with a question behind the last tool result."""
    *before, last = messages
    if last.role == "user":
        longer = replace(last, parts=(*last.parts, TextPart(_TEXTS[1])))
        yield (_with_messages(request, (*before, longer)),)
    elif last.role == "tool":
        yield (_with_messages(request, (*messages, _user_message(_TEXTS[1]))),)


def _with_next_turn(request: Request, messages: tuple[Message, ...]) -> Iterator[Probes]:
    """Yield pairs that continue the conversation: with a reply and a question, then with a tool call and its result."""
    if messages[-1].role == "assistant":
        return
    thought = (ReasoningPart(_TEXTS[1]), TextPart(_TEXTS[1]))
    turns: list[tuple[tuple[Part, ...], tuple[Part, ...], Message]] = [
        ((TextPart(_TEXTS[0]),), thought, _user_message("?"))
    ]
    if request.tools and request.tool_choice.mode != "none":
        call = ToolCallPart("call_000000000000000000000000", request.tools[0].name, {})
        turns.append(((call,), (*thought, call), _result_message(call, "?")))
    for short, long, following in turns:
        replies = (Message("assistant", short), Message("assistant", long))
        yield tuple(_with_messages(request, (*messages, reply, following)) for reply in replies)


def next_requests(request: Request, reply: Message, text: str) -> Iterator[Request]:
    """Yield the requests that can follow: with the reply's reasoning, then without it.

    `text` is the result of every tool call in the reply, or the next question if it has no calls.
    """
    assert request.messages is not None
    calls = [part for part in reply.parts if isinstance(part, ToolCallPart)]
    following = tuple(_result_message(call, text) for call in calls) or (_user_message(text),)
    before = request.messages[:-1] if request.continue_final_message else request.messages
    yield _with_messages(request, (*before, reply, *following))
    if any(isinstance(part, ReasoningPart) for part in reply.parts):
        parts = tuple(part for part in reply.parts if not isinstance(part, ReasoningPart))
        yield _with_messages(request, (*before, Message("assistant", parts), *following))


def _with_messages(request: Request, messages: tuple[Message, ...]) -> Request:
    """Return the request for a reply to another conversation, with the same tools and settings."""
    return replace(request, messages=messages, add_generation_prompt=True, continue_final_message=False)


def _user_message(text: str) -> Message:
    return Message("user", (TextPart(text),))


def _result_message(call: ToolCallPart, text: str) -> Message:
    return Message("tool", (ToolResultPart(call.call_id, (TextPart(text),), call.name),))
