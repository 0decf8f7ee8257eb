"""Conversation → text, by the checkpoint's own chat template. Knows no token ids."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..core.errors import TemplateError, Unsupported, first_line, setting
from ..core.messages import ImagePart, Message, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from ..core.request import RESERVED_TEMPLATE_KWARGS, Request
from ..formats import Calls, detect_formats
from ..formats.families import CALL_FORMATS
from ..formats.family import Spelling
from ..formats.tokenizer import TEMPLATE_FAILURES, Tokenizer
from ..media.sources import media_parts
from ..util.json_values import with_texts
from .shapes import PROBE_NAMES, Shapes
from .template_messages import CallIds, CallStyle, in_style, template_messages
from .turns import Turns

# Private characters. They replace a marker in the conversation's own text while it is rendered.
_ESCAPED = ("\uf8ff\ue000\uf8ff", "\uf8ff\ue001\uf8ff")
_ERROR_VARIABLE = re.compile(r"\bis_error\b")
_THINKING_VARIABLE = re.compile(r"(?<![\w.'\"])thinking(?![\w'\"])")

_PROBE_CALL = ToolCallPart("call_of_probe", PROBE_NAMES[0], {"probe_key": "probe_value"})
_PROBE_FIELDS: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOLS = [{"type": "function", "function": {"name": name, **_PROBE_FIELDS}} for name in PROBE_NAMES]
_OTHER_ID = "call_of_other"


def _called(call_id: str) -> tuple[Message, Message]:
    """Return a probe's call, and its result."""
    result = ToolResultPart(call_id, (TextPart("probe_result"),))
    return Message("assistant", (replace(_PROBE_CALL, call_id=call_id),)), Message("tool", (result,))


_QUESTION = (Message("user", (TextPart("probe"),)),)
_PROBE_MESSAGES = (*_QUESTION, *_called(_PROBE_CALL.call_id))


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    media_starts: tuple[int, ...] = ()  # characters before each image or video, in order
    rules: tuple[str, ...] = ()  # the rules by which the conversation was rewritten for its template


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


class ChatTemplate:
    """Renders conversations. Threads may share it.

    A template is rendered for one chat request before its first token once by `render_prompt`, and once more if a new
    conversation has tools. Where the model needs snapshot points, `probe` renders it up to ten times more (points.py).
    After the reply, `probe` runs once or twice more (processor.py). Some more renderings, once for each checkpoint,
    show which conversations the template takes (shapes.py).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        enable_thinking: bool | None = None,
        markers: MediaMarkers | None = None,
        calls: Calls | None = None,
    ):
        """`enable_thinking` is the server's default. If it is None, reasoning is on, but a template that knows only the
        variable `thinking` keeps its own default. `markers` is None if the model takes no images. `calls`: the format
        in which the model writes calls, by default the one that is detected.
        """
        self._tokenizer = tokenizer
        self._markers = markers
        self._enable_thinking = enable_thinking
        self._calls = calls
        self._shapes = Shapes(self._probe_turns, None if markers is None else markers.image)

    def render_prompt(self, request: Request) -> Rendered:
        """Return the text of the request's prompt, in which each image and video has a separate text.

        Raises TemplateError without a template or if it refuses the conversation, Unsupported if it shows no tools.
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
            return self._apply(request)
        if markers is None:
            raise Unsupported("This model takes no images. Send text, or serve a vision model.", param="messages")
        media = [(str(markers.image if isinstance(part, ImagePart) else markers.video), part.text) for part in parts]
        applied = self._apply(request, escaping=markers)
        rendered = markers.fill_in(applied.text, media)
        if rendered is None:
            raise TemplateError(
                "The model's chat template cannot show the images of this conversation.", param="messages"
            )
        return replace(rendered, rules=applied.rules)

    def _check_tools(self, request: Request, text: str) -> None:
        """Raise Unsupported if the prompt is the same without tools. Some templates show them only to new questions."""
        assert request.messages is not None
        is_later = any(message.role == "assistant" for message in request.messages)
        if not _shown_tools(request) or (is_later and self.shows_tools):
            return
        with suppress(TemplateError):  # a template that is only for tools shows them
            if self._render(replace(request, tools=())).text == text:
                raise Unsupported(
                    "This model's chat template does not show `tools`, so the model cannot know of them. Leave `tools` "
                    f"out, serve a model that calls tools, or set a {setting('chat_template')} that shows them.",
                    param="tools",
                )

    @cached_property
    def shows_tools(self) -> bool:
        return self._shapes.shows_tools("su") or self._shapes.shows_tools("u")

    def _apply(self, request: Request, *, escaping: MediaMarkers | None = None) -> Rendered:
        """Run the template. `escaping` are the markers that the conversation's own texts must not contain."""
        assert request.messages is not None
        if self._tokenizer.chat_template is None:
            raise TemplateError(
                "This model has no chat template: use /v1/completions, or start the server with "
                f"{setting('chat_template')}.",
                param="messages",
            )
        sent = [tool.to_openai() for tool in _shown_tools(request)]
        tools = [self._with_fields(tool) for tool in sent]
        style = self._style_for(request.messages)
        turns = Turns(self._shapes, bool(tools), request.continue_final_message)
        placed, changed = turns.place(in_style(request.messages, style, self._spelling))
        rules = (*style.rules, *changed, *(["fields of tools"] if tools != sent else []))
        messages = template_messages(placed, style)
        if escaping is not None:
            messages, tools = escaping.escape(messages), escaping.escape(tools)
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or self._no_tools,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                **self._variables(request),
            )
        except TEMPLATE_FAILURES as error:
            raise self._refused(tools, first_line(error)) from error
        return Rendered(text, rules=rules)

    def _refused(self, tools: Sequence[dict[str, Any]], reason: str) -> TemplateError:
        """Return the error, which names a tool if the template cannot show it to any conversation."""
        is_shown = tools and self._probe_messages(_QUESTION, tools=_PROBE_TOOLS) is not None
        if not is_shown or self._probe_messages(_QUESTION, tools=tools) is not None:
            return TemplateError(f"The model's chat template cannot take this conversation: {reason}", param="messages")
        while len(tools) > 1:
            half = tools[: len(tools) // 2]
            tools = tools[len(half) :] if self._probe_messages(_QUESTION, tools=half) is not None else half
        message = f"The model's chat template cannot show the tool `{tools[0]['function']['name']}`: {reason}"
        return TemplateError(message, param="tools")

    def _with_fields(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Add empty fields that the tool lacks, if the template refuses tools without them."""
        if not self._demanded_fields:
            return tool
        function = dict(tool["function"])
        for field in self._demanded_fields & _PROBE_FIELDS.keys():
            function.setdefault(field, _PROBE_FIELDS[field])
        parameters = function.get("parameters", {"properties": None})
        if "properties" in self._demanded_fields and "properties" not in parameters:
            parameters = function["parameters"] = parameters | {"properties": {}}
        if "property" in self._demanded_fields and isinstance(properties := parameters.get("properties"), dict):
            described = {
                key: value | {"description": value.get("description", "")} for key, value in properties.items()
            }
            function["parameters"] = parameters | {"properties": described}
        return {**tool, "function": function}

    @cached_property
    def _demanded_fields(self) -> frozenset[str]:
        """Return the fields without which the template refuses a tool; "property": the description of a property."""
        described = {"type": "object", "properties": {"probe_key": {"type": "string", "description": ""}}}
        tools: dict[str, dict[str, Any]] = {
            "": {"description": "", "parameters": described},
            "description": {"parameters": described},
            "parameters": {"description": ""},
            "properties": {"description": "", "parameters": {"type": "object"}},
            "property": {"description": "", "parameters": {"properties": {"probe_key": {"type": "string"}}}},
        }
        probes = {
            name: [{"type": "function", "function": {"name": "probe_tool", **rest}}] for name, rest in tools.items()
        }
        refused = frozenset(name for name in probes if self._probe_messages(_QUESTION, tools=probes[name]) is None)
        return frozenset() if "" in refused else refused

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """Return the value of `tools` without any: a list if the template refuses None."""
        is_list = self._probe_messages(_QUESTION) is None and self._probe_messages(_QUESTION, tools=[]) is not None
        return [] if is_list else None

    def _variables(self, request: Request) -> dict[str, Any]:
        assert not RESERVED_TEMPLATE_KWARGS & request.template_kwargs.keys(), "they are refused where they are decoded"
        chosen = self._enable_thinking if request.thinking == "auto" else request.thinking == "on"
        variables: dict[str, Any] = {"enable_thinking": chosen is not False}
        if chosen is not None and _THINKING_VARIABLE.search(self._tokenizer.chat_template or ""):
            variables["thinking"] = chosen
        return {**variables, **request.template_kwargs}

    def needs(self) -> tuple[str, ...]:
        """Return the rules by which conversations are rewritten for this template, to tell the operator."""
        with suppress(TemplateError):  # a rendering may take too long
            if self._tokenizer.chat_template is not None:
                fields = ["fields of tools"] if self._demanded_fields else []
                return (*self._style.rules, *Turns(self._shapes, self.shows_tools).needs(), *fields)
        return ()

    def _probe_turns(self, messages: Sequence[Message], has_tools: bool | None) -> str | None:
        tools = _PROBE_TOOLS if has_tools else None if has_tools is None else self._no_tools
        return self._probe_messages(messages, self._style_for(messages), tools=tools)

    def _probe_messages(
        self,
        messages: Sequence[Message],
        style: CallStyle = CallStyle(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> str | None:
        """Return the rendered text of messages that have only text or calls; None if the template refuses them."""
        written = template_messages(in_style(messages, style, self._spelling), style)
        try:
            return self._tokenizer.apply_chat_template(written, add_generation_prompt=True, **kwargs)
        except TEMPLATE_FAILURES:
            return None

    @cached_property
    def _spelling(self) -> Spelling:
        """Return the spelling of calls as text."""
        detected = detect_formats(self._tokenizer.chat_template, self._tokenizer)[1]
        return (self._calls or CALL_FORMATS[detected or "generic"]).spelling(self._tokenizer)

    def _style_for(self, messages: Sequence[Message]) -> CallStyle:
        kinds = {type(part) for message in messages for part in message.parts}
        if ToolCallPart in kinds:
            return self._style
        return CallStyle(ids=self._style.ids) if ToolResultPart in kinds else CallStyle()

    @cached_property
    def _style(self) -> CallStyle:
        style = next(filter(self._writes_calls, _styles()), CallStyle())
        if style.ids == "own" and self._confuses_ids(style):
            style = replace(style, ids="unique")
        return replace(style, knows_errors=bool(_ERROR_VARIABLE.search(self._tokenizer.chat_template or "")))

    def _writes_calls(self, style: CallStyle) -> bool:
        """Return whether the template writes a probe's tool call and its result in full.

        Templates drop or garble unexpected messages as often as they refuse them.
        """
        without = self._probe_messages(_QUESTION, style, tools=_PROBE_TOOLS)
        text = self._probe_messages(_PROBE_MESSAGES, style, tools=_PROBE_TOOLS)
        if without is None or text is None or text.count("probe_result") != 1:
            return False
        is_written = text.count(_PROBE_CALL.name) > without.count(_PROBE_CALL.name) and "probe_value" in text
        is_whole = is_written and "{'probe_key'" not in text and '\\"probe_key' not in text
        return is_whole and (f"functions.{_PROBE_CALL.name}:" not in text or self._numbers_calls(style))

    def _numbers_calls(self, style: CallStyle) -> bool:
        """Return whether the second call and its result have the same number."""
        text = self._probe_messages((*_PROBE_MESSAGES, *_PROBE_MESSAGES[1:]), style, tools=_PROBE_TOOLS)
        num_written = 1 if style.results_are_users else 2
        return text is not None and text.count(f"functions.{_PROBE_CALL.name}:1") == num_written

    def _confuses_ids(self, style: CallStyle) -> bool:
        """Return whether a second call with the id of the first changes more of the prompt than this id."""
        same, other = (
            self._probe_messages((*_PROBE_MESSAGES, *_called(call_id)), style, tools=_PROBE_TOOLS) or ""
            for call_id in (_PROBE_CALL.call_id, _OTHER_ID)
        )
        return same != other.replace(_OTHER_ID, _PROBE_CALL.call_id)


def _shown_tools(request: Request) -> Sequence[ToolSpec]:
    return () if request.tool_choice.mode == "none" else request.tools


def _styles() -> Iterator[CallStyle]:
    """Yield all styles, the usual one first."""
    all_ids: tuple[CallIds, ...] = ("own", "short", "numbered")
    for results_are_users, calls_are_text in itertools.product((False, True), repeat=2):
        for ids, content, are_text in itertools.product(all_ids, ("", None), (False, True)):
            if not calls_are_text or (content == "" and not are_text):
                yield CallStyle(are_text, content, ids, calls_are_text, results_are_users)
