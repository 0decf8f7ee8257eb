"""Conversation → text, through the checkpoint's own chat template. Knows no ids."""

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

from ..core.errors import InvalidParameter, TemplateError
from ..core.messages import ImagePart, Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from ..core.request import Request
from .tokenizer import Tokenizer

# A template is a program: besides Jinja's own errors it fails as Python does on a value it did not expect.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


class ChatTemplate:
    """`enable_thinking`: the server's default; None means on."""

    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool | None = None):
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking is not False

    def render(self, request: Request) -> str:
        """Raises TemplateError where there is no template or it refuses the conversation."""
        assert request.messages is not None
        if self._tokenizer.chat_template is None:
            raise TemplateError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        tools = [tool.to_openai() for tool in request.tools] if request.tool_choice.mode != "none" else []
        try:
            return self._tokenizer.apply_chat_template(
                template_messages(request.messages),
                tools=tools or None,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                **self._variables(request),
            )
        except _FAILURES as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TemplateError(
                f"The model's chat template cannot take this conversation: {reason}", param="messages"
            ) from error

    def _variables(self, request: Request) -> dict[str, Any]:
        for name in request.template_kwargs:
            if name in _RESERVED:
                raise InvalidParameter(
                    f"`chat_template_kwargs` must not set `{name}`: the request has a field for it.",
                    param="chat_template_kwargs",
                )
        thinking = self._enable_thinking if request.thinking == "auto" else request.thinking == "on"
        return {"enable_thinking": thinking, **request.template_kwargs}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The dicts that chat templates read. A tool result is a message of its own, wherever the client put it."""
    result: list[dict[str, Any]] = []
    for message in messages:
        run: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                if run:
                    result.append(_template_message(message, run))
                    run = []
                result.append(_tool_result(part))
            else:
                run.append(part)
        if run or not message.parts:
            result.append(_template_message(message, run))
    return result


def _template_message(message: Message, parts: Sequence[Part]) -> dict[str, Any]:
    # Text of the model itself was one stream; parts of a client are separate texts.
    content = _content(parts, separator="" if message.role == "assistant" else "\n")
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    reasoning = [part.text for part in parts if isinstance(part, ReasoningPart)]
    if reasoning:
        result["reasoning_content"] = "".join(reasoning)
    calls = [_tool_call(part) for part in parts if isinstance(part, ToolCallPart)]
    if calls:
        result["tool_calls"] = calls
    return result


def _tool_call(part: ToolCallPart) -> dict[str, Any]:
    return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def _tool_result(part: ToolResultPart) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": part.call_id, "content": _content(part.content, separator="\n")}
    return result if part.name is None else {**result, "name": part.name}


def _content(parts: Iterable[Part], *, separator: str) -> str | list[dict[str, Any]]:
    """Text alone is a string, which every template takes; with images, it is a list."""
    shown = [part for part in parts if isinstance(part, TextPart | ImagePart)]
    if any(isinstance(part, ImagePart) for part in shown):
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in shown
        ]
    return separator.join(part.text for part in shown if isinstance(part, TextPart))
