"""Conversation → text, by the checkpoint's own chat template. Knows no token ids."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..core.errors import TemplateError, Unsupported, first_line, setting
from ..core.json_values import with_texts
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
    ToolSpec,
    VideoPart,
)
from ..core.request import RESERVED_TEMPLATE_KWARGS, Request
from ..formats.tokenizer import TEMPLATE_FAILURES, Tokenizer
from ..media.sources import media_parts
from .system_turns import SystemTurns

# Private characters. They stand for a marker that is part of the conversation's own text while it is rendered.
_ESCAPED = ("\uf8ff\ue000\uf8ff", "\uf8ff\ue001\uf8ff")
_ERROR_VARIABLE = re.compile(r"\bis_error\b")
_THINKING_VARIABLE = re.compile(r"(?<![\w.'\"])thinking(?![\w'\"])")
_ERROR_WORD = re.compile(r"error|exception|failed|exit code", re.IGNORECASE)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

_PROBE_CALL = ToolCallPart("call_of_probe", "probe_tool", {"probe_key": "probe_value"})
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE_CALL.name, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_MESSAGES = (
    Message("user", (TextPart("probe"),)),
    Message("assistant", (_PROBE_CALL,)),
    Message("tool", (ToolResultPart(_PROBE_CALL.call_id, (TextPart("probe_result"),)),)),
)


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    media_starts: tuple[int, ...] = ()  # characters before each image or video, in order


class MediaMarkers:
    """The texts that a template writes for an image, and for a video if the model takes videos."""

    def __init__(self, image: str, video: str | None = None):
        self.image = image
        self.video = video
        given = [marker for marker in (image, video) if marker is not None]
        self._escapes = list(zip(given, _ESCAPED, strict=False))
        self._split = re.compile(f"({'|'.join(map(re.escape, given))})")

    def escape(self, value: Any) -> Any:
        """Return the value without any marker in its texts, so that every marker in the rendered text is for media."""
        return with_texts(value, self._escaped)

    def fill_in(self, text: str, media: Sequence[tuple[str, str]]) -> Rendered | None:
        """Put texts in the places of the markers. `media` is a (marker, text) pair for each image and video.

        Returns None if `text` does not have exactly these markers in this order.
        """
        first, *rest = self._split.split(text)
        if rest[::2] != [marker for marker, _ in media]:
            return None
        parts, starts = [self._unescaped(first)], []
        length = len(parts[0])
        for (_, media_text), part in zip(media, map(self._unescaped, rest[1::2]), strict=True):
            starts.append(length)
            parts += [media_text, part]
            length += len(media_text) + len(part)
        return Rendered("".join(parts), tuple(starts))

    def _escaped(self, text: str) -> str:
        for marker, escaped in self._escapes:
            text = text.replace(marker, escaped)
        return text

    def _unescaped(self, text: str) -> str:
        for marker, escaped in self._escapes:
            text = text.replace(escaped, marker)
        return text


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template takes messages with tool calls."""

    arguments_are_text: bool = False  # JSON text, for a template that does not write objects as JSON itself
    empty_content: str | None = ""  # the content of a message that has only calls; None is a null content
    ids_are_short: bool = False  # nine letters or digits
    knows_errors: bool = False  # it reads `is_error` of a tool result


class ChatTemplate:
    """Renders conversations. Threads may share it.

    A template is rendered up to eleven times for one chat request before its first token: once by `render_prompt`,
    once more if a new conversation has tools, and up to nine times by `probe` to plan the snapshot points (points.py).
    After the reply, `probe` runs once or twice more (chat.py). A few more renderings, once for each checkpoint, show
    how the template treats system messages, tools and calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, enable_thinking: bool | None = None, markers: MediaMarkers | None = None
    ):
        """`enable_thinking` is the server's default. If it is None, reasoning is on, but a template that knows only the
        variable `thinking` keeps its own default. `markers` is None if the model takes no images.
        """
        self._tokenizer = tokenizer
        self._markers = markers
        self._enable_thinking = enable_thinking
        self._style: CallStyle | None = None
        self._system_turns = SystemTurns(self._probe_messages)

    def render_prompt(self, request: Request) -> Rendered:
        """Return the text of the request's prompt, in which each image and video has a text of its own.

        Raises TemplateError if there is no template or it refuses the conversation, Unsupported if it shows no tools.
        """
        rendered = self._render(request)
        self._check_tools(request, rendered.text)
        return rendered

    def probe(self, request: Request) -> str:
        """Render a conversation that is never sent to a model, to find where the template puts things.

        Raises as `render_prompt` does.
        """
        return self._render(request).text

    def _render(self, request: Request) -> Rendered:
        parts, markers = media_parts(request), self._markers
        if not parts:
            return Rendered(self._apply(request))
        if markers is None:
            raise Unsupported("This model takes no images. Send text, or serve a vision model.", param="messages")
        media = [(str(markers.image if isinstance(part, ImagePart) else markers.video), part.text) for part in parts]
        rendered = markers.fill_in(self._apply(request, escaping=markers), media)
        if rendered is None:
            raise TemplateError(
                "The model's chat template cannot show the images of this conversation.", param="messages"
            )
        return rendered

    def _check_tools(self, request: Request, text: str) -> None:
        """Raise Unsupported if the prompt is the same without tools. Some templates show them only to new questions."""
        assert request.messages is not None
        is_later = any(message.role == "assistant" for message in request.messages)
        if not _shown_tools(request) or (is_later and self._shows_tools):
            return
        if self._render(replace(request, tools=())).text == text:
            raise Unsupported(
                "This model's chat template does not show `tools`, so the model cannot know of them. Leave `tools` "
                f"out, serve a model that calls tools, or set a {setting('chat_template')} that shows them.",
                param="tools",
            )

    @cached_property
    def _shows_tools(self) -> bool:
        messages = [Message("system", (TextPart("probe"),)), *_PROBE_MESSAGES[:1]]
        return any(
            _PROBE_CALL.name in (self._probe_messages(probe, tools=[_PROBE_TOOL]) or "")
            for probe in (messages, messages[1:])
        )

    def _apply(self, request: Request, *, escaping: MediaMarkers | None = None) -> str:
        """Run the template. `escaping` are the markers that the conversation's own texts must not contain."""
        assert request.messages is not None
        if self._tokenizer.chat_template is None:
            raise TemplateError(
                "This model has no chat template: use /v1/completions, or start the server with "
                f"{setting('chat_template')}.",
                param="messages",
            )
        tools = [tool.to_openai() for tool in _shown_tools(request)]
        placed = self._system_turns.place(request.messages)
        messages = template_messages(placed, self._style_for(placed))
        if escaping is not None:
            messages, tools = escaping.escape(messages), escaping.escape(tools)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                **self._variables(request),
            )
        except TEMPLATE_FAILURES as error:
            message = f"The model's chat template cannot take this conversation: {first_line(error)}"
            raise TemplateError(message, param="messages") from error

    def _variables(self, request: Request) -> dict[str, Any]:
        assert not RESERVED_TEMPLATE_KWARGS & request.template_kwargs.keys(), "they are refused where they are decoded"
        chosen = self._enable_thinking if request.thinking == "auto" else request.thinking == "on"
        variables: dict[str, Any] = {"enable_thinking": chosen is not False}
        if chosen is not None and _THINKING_VARIABLE.search(self._tokenizer.chat_template or ""):
            variables["thinking"] = chosen
        return {**variables, **request.template_kwargs}

    def _probe_messages(self, messages: Sequence[Message], style: CallStyle | None = None, **kwargs: Any) -> str | None:
        """The rendered text of messages that have only text or calls; None if the template refuses them."""
        try:
            return self._tokenizer.apply_chat_template(
                template_messages(messages, style), add_generation_prompt=True, **kwargs
            )
        except TEMPLATE_FAILURES:
            return None

    def _style_for(self, messages: Sequence[Message]) -> CallStyle:
        if not any(isinstance(part, ToolCallPart) for message in messages for part in message.parts):
            return CallStyle()
        if self._style is None:
            style = next(filter(self._writes_calls, _styles()), CallStyle())
            self._style = replace(style, knows_errors=bool(_ERROR_VARIABLE.search(self._tokenizer.chat_template or "")))
        return self._style

    def _writes_calls(self, style: CallStyle) -> bool:
        """Whether the template writes a probe's tool call in full.

        Templates drop or garble what they do not expect as often as they refuse it.
        """
        tools = [_PROBE_TOOL]
        without = self._probe_messages(_PROBE_MESSAGES[:1], style, tools=tools)
        text = self._probe_messages(_PROBE_MESSAGES, style, tools=tools)
        if without is None or text is None:
            return False
        is_written = text.count(_PROBE_CALL.name) > without.count(_PROBE_CALL.name) and "probe_value" in text
        return is_written and "{'probe_key'" not in text and '\\"probe_key' not in text


def _shown_tools(request: Request) -> Sequence[ToolSpec]:
    return () if request.tool_choice.mode == "none" else request.tools


def _styles() -> Iterable[CallStyle]:
    """All styles, the usual one first."""
    return (
        CallStyle(arguments_are_text, empty_content, ids_are_short)
        for ids_are_short, empty_content, arguments_are_text in itertools.product(
            (False, True), ("", None), (False, True)
        )
    )


def template_messages(messages: Sequence[Message], style: CallStyle | None = None) -> list[dict[str, Any]]:
    """The dicts that chat templates read. Every tool result becomes a message of its own."""
    style = style or CallStyle()
    result: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # call id → name of the tool
    for message in messages:
        names |= {part.call_id: part.name for part in message.parts if isinstance(part, ToolCallPart)}
        run: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                if run:
                    result.append(_template_message(message, run, style))
                    run = []
                result.append(_tool_result(part, names.get(part.call_id), style))
            else:
                run.append(part)
        if run or not message.parts:
            result.append(_template_message(message, run, style))
    return result


def _template_message(message: Message, parts: Sequence[Part], style: CallStyle) -> dict[str, Any]:
    # The parts of a reply were one text when the model wrote them; the parts that a client sends are separate texts.
    content = _content(parts, separator="" if message.role == "assistant" else "\n")
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    reasoning = [part.text for part in parts if isinstance(part, ReasoningPart)]
    if reasoning:
        result["reasoning_content"] = "".join(reasoning)
    calls = [_tool_call(part, style) for part in parts if isinstance(part, ToolCallPart)]
    if calls:
        result["content"] = content or style.empty_content
        result["tool_calls"] = calls
    return result


def _tool_call(part: ToolCallPart, style: CallStyle) -> dict[str, Any]:
    arguments = json.dumps(part.arguments, ensure_ascii=False) if style.arguments_are_text else part.arguments
    function = {"name": part.name, "arguments": arguments}
    return {"id": _call_id(part.call_id, style), "type": "function", "function": function}


def _tool_result(part: ToolResultPart, called: str | None, style: CallStyle) -> dict[str, Any]:
    parts = part.content if style.knows_errors or not part.is_error else _as_error(part.content)
    content = _content(parts, separator="\n")
    result: dict[str, Any] = {"role": "tool", "tool_call_id": _call_id(part.call_id, style), "content": content}
    if part.is_error and style.knows_errors:
        result["is_error"] = True
    name = part.name if part.name is not None else called
    return result if name is None else {**result, "name": name}


def _as_error(content: Sequence[Part]) -> Sequence[Part]:
    """Add "Error:" before a failed result, unless its first line says that it failed, as nearly every tool's does."""
    first = next((part.text for part in content if isinstance(part, TextPart) and part.text.strip()), "")
    says_so = _ERROR_WORD.search(first.strip().partition("\n")[0])
    return content if says_so else (TextPart("Error:"), *content)


def _call_id(call_id: str, style: CallStyle) -> str:
    if not style.ids_are_short or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _content(parts: Iterable[Part], *, separator: str) -> str | list[dict[str, Any]]:
    """A string for text alone, which every template takes; a list where there are images or videos."""
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
