"""Request bodies → core Requests, and how the client wants the reply written. Every field is honoured or refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import Message, TextPart
from ...core.request import Request
from ..guides import decode_format
from ..parameters import decode_sampling, decode_thinking
from ..quirks import without_client_marks
from ..wire import Refused
from .fields import INCLUDED
from .items import KeptInput, decode_items, kept_input
from .schema import InputItem, InputText, MessageItem, ResponsesBody
from .tools import Tools, decode_tool_choice, decode_tools

ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """How the reply is written. `created_at` is in unix seconds; `echo` holds the request's fields that it repeats."""

    reply_id: str
    model: str
    created_at: int
    stream: bool = False
    store: bool = True
    background: bool = False
    shows_summary: bool = False
    seals_reasoning: bool = False  # so that the client can send back reasoning that is not stored
    tools: Tools = field(default_factory=Tools)
    echo: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedResponse:
    """`kept` is the input of this request, without earlier responses; empty if the response is not stored."""

    request: Request
    reply: ResponseSpec
    kept: KeptInput


def decode_response(
    body: ResponsesBody, *, earlier: Sequence[InputItem] = (), reply_id: str, model: str, created_at: int
) -> DecodedResponse:
    """`earlier` is the conversation that `previous_response_id` names."""
    _check_include(body)
    _check_background(body)
    tools = decode_tools(body.tools or ())
    reasoning = body.reasoning
    items = _input_items(body)
    request = Request(
        request_id=reply_id,
        messages=_messages(body, [*earlier, *items]),
        tools=tools.specs,
        tool_choice=decode_tool_choice(body.tool_choice, tools.specs),
        max_tool_calls=1 if body.parallel_tool_calls is False else None,
        sampling=decode_sampling(
            body, max_tokens=body.max_output_tokens, guide=decode_format(_format(body), "text.format", nested=False)
        ),
        cache_reasoning="keep" if body.cache_reasoning_tokens else None,
        cache_salt=body.cache_salt or "",
        **decode_thinking(None if reasoning is None else reasoning.effort, body.chat_template_kwargs),
    )
    spec = ResponseSpec(
        reply_id=reply_id,
        model=model,
        created_at=created_at,
        stream=bool(body.stream),
        store=body.store is not False,
        background=bool(body.background),
        shows_summary=reasoning is not None and bool(reasoning.summary or reasoning.generate_summary),
        seals_reasoning=body.store is False or ENCRYPTED_REASONING in (body.include or ()),
        tools=tools,
        echo=_echo(body),
    )
    kept = kept_input(items, reply_id) if spec.store else KeptInput()
    return DecodedResponse(request=request, reply=spec, kept=kept)


def _input_items(body: ResponsesBody) -> tuple[InputItem, ...]:
    if isinstance(body.input, str):
        text = InputText(type="input_text", text=body.input)
        return (MessageItem(type="message", role="user", content=[text]),)
    return tuple(body.input)


def _messages(body: ResponsesBody, items: Sequence[InputItem]) -> tuple[Message, ...]:
    """The conversation. `instructions` are those of this request: earlier ones are not repeated."""
    messages = decode_items(items)
    if body.instructions:
        messages.insert(0, Message("system", (TextPart(body.instructions),)))
    if not messages:
        raise InvalidParameter("`input` must not be empty.", param="input")
    return without_client_marks(messages)


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    return None if body.text is None else body.text.format


def _check_include(body: ResponsesBody) -> None:
    for name in body.include or ():
        rule = INCLUDED.get(name)
        if rule is None or isinstance(rule, Refused):
            advice = "Leave it out." if rule is None else rule.advice
            raise Unsupported(f"`include` '{shown(name)}' is not supported. {advice}", param="include")


def _check_background(body: ResponsesBody) -> None:
    if not body.background:
        return
    if body.stream:
        raise Unsupported("`background` does not go with `stream`: poll the response.", param="background")
    if body.store is False:
        raise InvalidParameter("`background` needs `store`: the response is read later.", param="background")


def _echo(body: ResponsesBody) -> dict[str, Any]:
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    choice = body.tool_choice
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": body.store is not False,
        "background": bool(body.background),
        "temperature": body.temperature,
        "text": {"format": _format(body) or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
