"""Messages → the dicts that chat templates read. Knows no template."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..core.messages import (
    ImagePart,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    ShownPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    VideoPart,
)
from ..formats.family import Spelling
from ..formats.written import written_calls

_ERROR_WORD = re.compile(r"error|exception|failed|exit code", re.IGNORECASE)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


CallIds = Literal["own", "short", "numbered", "unique"]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template takes messages with tool calls."""

    arguments_are_text: bool = False  # JSON text, for a template that does not write objects as JSON itself
    empty_content: str | None = ""  # the content of a message that has only calls; None is a null content
    ids: CallIds = "own"  # short: nine letters or digits; numbered: `functions.NAME:0`; unique
    calls_are_text: bool = False  # the template writes no calls: they become text of the message, as the model writes
    results_are_users: bool = False  # the template writes no results: they become messages of the user
    knows_errors: bool = False  # it reads `is_error` of a tool result

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the rules by which the style rewrites conversations."""
        holds = (self.ids in ("numbered", "unique"), self.calls_are_text, self.results_are_users)
        return tuple(itertools.compress(("ids of calls", "calls as text", "results as text"), holds))


def in_style(messages: Sequence[Message], style: CallStyle, written: Spelling) -> list[Message]:
    """Return the messages, each tool result as a separate message, in the form in which the template takes calls.

    `written`: how calls are written as text.
    """
    result: list[Message] = []
    calls: dict[str, ToolCallPart] = {}  # by the id that the client sent
    num_calls = 0
    for message in apart(messages):
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                call_id = part.call_id
                if style.ids == "numbered":
                    part = replace(part, call_id=f"functions.{part.name}:{num_calls}")
                elif style.ids == "unique" and call_id in calls:
                    part = replace(part, call_id=f"{call_id}:{num_calls}")
                calls[call_id], num_calls = part, num_calls + 1
            elif isinstance(part, ToolResultPart) and (call := calls.get(part.call_id)) is not None:
                part = replace(part, call_id=call.call_id, name=call.name if part.name is None else part.name)
            elif isinstance(part, ToolResultPart) and style.ids == "unique":
                part = replace(part, call_id=f"{part.call_id}:{len(result)}")
            parts.append(part)
        made = [part for part in parts if isinstance(part, ToolCallPart)]
        if made and style.calls_are_text:
            said = [part for part in parts if not isinstance(part, ToolCallPart)]
            parts = [*said, TextPart(written_calls(written, made))]
        message = replace(message, parts=tuple(parts))
        result.append(as_user(message) if message.role == "tool" and style.results_are_users else message)
    return result


def apart(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, each tool result as a separate message."""
    for message in messages:
        for is_result, parts in itertools.groupby(message.parts, lambda part: isinstance(part, ToolResultPart)):
            if is_result:
                yield from (Message("tool", (part,)) for part in parts)
            else:
                yield replace(message, parts=tuple(parts))
        if not message.parts:
            yield message


def as_user(message: Message) -> Message:
    """Turn a message with a tool result into one of the user."""
    contents = (_result_content(part) if isinstance(part, ToolResultPart) else (part,) for part in message.parts)
    shown = itertools.chain.from_iterable(contents)
    return Message("user", (TextPart("<tool_response>"), *shown, TextPart("</tool_response>")))


def template_messages(messages: Sequence[Message], style: CallStyle = CallStyle()) -> list[dict[str, Any]]:
    """Return the dicts that chat templates read. `messages`: in the style, each tool result a separate message."""
    return [_template_message(message, style) for message in messages]


def _template_message(message: Message, style: CallStyle) -> dict[str, Any]:
    if message.parts and isinstance(part := message.parts[0], ToolResultPart):
        return _tool_result(part, style)
    # The parts of a reply were one text when the model wrote them; the parts that a client sends are separate texts.
    content = _content(message.parts, separator="" if message.role == "assistant" else "\n")
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    reasoning = [part.text for part in message.parts if isinstance(part, ReasoningPart)]
    if reasoning:
        result["reasoning_content"] = "".join(reasoning)
    calls = [_tool_call(part, style) for part in message.parts if isinstance(part, ToolCallPart)]
    if calls:
        result["content"] = content or style.empty_content
        result["tool_calls"] = calls
    return result


def _tool_call(part: ToolCallPart, style: CallStyle) -> dict[str, Any]:
    arguments = json.dumps(part.arguments, ensure_ascii=False) if style.arguments_are_text else part.arguments
    function = {"name": part.name, "arguments": arguments}
    return {"id": _call_id(part.call_id, style), "type": "function", "function": function}


def _tool_result(part: ToolResultPart, style: CallStyle) -> dict[str, Any]:
    content = _content(part.content if style.knows_errors else _result_content(part), separator="\n")
    result: dict[str, Any] = {"role": "tool", "tool_call_id": _call_id(part.call_id, style), "content": content}
    if part.is_error and style.knows_errors:
        result["is_error"] = True
    return result if part.name is None else {**result, "name": part.name}


def _result_content(result: ToolResultPart) -> Sequence[Part]:
    """Add "Error:" before a failed result, unless its first line says that it failed, as nearly every tool's does."""
    if not result.is_error:
        return result.content
    content = result.content
    first = next((part.text for part in content if isinstance(part, TextPart) and part.text.strip()), "")
    says_so = _ERROR_WORD.search(first.strip().partition("\n")[0])
    return content if says_so else (TextPart("Error:"), *content)


def _call_id(call_id: str, style: CallStyle) -> str:
    if style.ids != "short" or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _content(parts: Iterable[Part], *, separator: str) -> str | list[dict[str, Any]]:
    """Return a string for text alone, which every template takes; a list where there are images or videos."""
    content = [part for part in parts if isinstance(part, ShownPart)]
    if any(isinstance(part, MediaPart) for part in content):
        return [_content_part(part) for part in content]
    return separator.join(part.text for part in content if isinstance(part, TextPart))


def _content_part(part: ShownPart) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}
