"""Conversations that are rendered to learn where a template puts things, never sent to a model. Pure."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from ..core.request import Request

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
