"""Request bodies → core Requests, and how the client wants the reply written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import Message, TextPart, ToolCallPart, ToolResultPart
from ...core.request import Guide, Request, SamplingParams, check_stop
from ..guides import decode_format, one_guide
from ..parameters import decode_sampling
from ..quirks import without_client_marks
from ..sealed import Unsealer
from . import schema
from .content import Toolbox, decode_assistant, decode_block, decode_content, decode_result, decode_tool_choice

MIN_BUDGET_TOKENS = 1024

ThinkingBlocks = Literal["visible", "sealed", "hidden"]
ThinkingPolicy = Literal["asked", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """How the reply is written.

    `thinking`: whether the reply has thinking blocks. If `sealed`, they are empty and their signature holds the
    reasoning.
    """

    reply_id: str
    model: str
    stream: bool = False
    thinking: ThinkingBlocks = "visible"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedMessage:
    request: Request
    reply: MessageSpec


def decode_messages_request(
    body: schema.MessagesBody, *, reply_id: str, model: str, messages_thinking: ThinkingPolicy = "asked"
) -> DecodedMessage:
    """`messages_thinking` says which requests get thinking blocks: the ones that ask for them, or all."""
    if body.mcp_servers:
        raise Unsupported("This server calls no MCP servers; offer their tools through `tools`.", param="mcp_servers")
    _check_budget(body)
    sampling = decode_sampling(
        body, max_tokens=body.max_tokens, stop=_stop(body.stop_sequences or ()), guide=_guide(body)
    )
    spec = MessageSpec(
        reply_id=reply_id,
        model=model,
        stream=bool(body.stream),
        thinking=_thinking_blocks(body, messages_thinking),
    )
    request = _request(body, reply_id, sampling)
    if body.cache_reasoning_tokens:
        request = replace(request, cache_reasoning="keep")
    return DecodedMessage(request=request, reply=spec)


def decode_count_request(body: schema.CountTokensBody, *, request_id: str) -> Request:
    """The request whose prompt is counted: the same as /v1/messages would make from these fields."""
    return _request(body, request_id, SamplingParams())


def _request(body: schema.CountTokensBody, request_id: str, sampling: SamplingParams) -> Request:
    tools = Toolbox(body.tools or ())
    messages = _decode_conversation(body, tools)
    tool_choice, max_tool_calls = decode_tool_choice(body.tool_choice, tools)
    continues_reply = _ends_in_text(messages)
    return Request(
        request_id=request_id,
        messages=messages,
        tools=tuple(tools.listed),
        unlisted_tools=tuple(tools.deferred),
        tool_choice=tool_choice,
        max_tool_calls=max_tool_calls,
        sampling=sampling,
        thinking=_thinking(body),
        thinking_limit=body.thinking.budget_tokens if isinstance(body.thinking, schema.ThinkingEnabled) else None,
        template_kwargs=_template_kwargs(body),
        add_generation_prompt=not continues_reply,
        continue_final_message=continues_reply,
        cache_salt=body.cache_salt or "",
    )


def _decode_conversation(body: schema.CountTokensBody, tools: Toolbox) -> tuple[Message, ...]:
    """The messages in their order, system messages too. Tool results precede the text of their message."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    unsealer = Unsealer()
    if body.system:
        messages.append(Message("system", decode_content(body.system, tools, "system")))
    for number, message in enumerate(body.messages):
        path = f"messages[{number}].content"
        match message:
            case schema.AssistantMessage():
                parts = decode_assistant(message, unsealer, path)
                names.update((part.call_id, part.name) for part in parts if isinstance(part, ToolCallPart))
                messages.append(Message("assistant", parts))
            case schema.SystemMessage():
                messages.append(Message("system", decode_content(message.content, tools, path)))
            case schema.UserMessage():
                messages += _user(message, names, tools, path)
    return without_client_marks(messages)


def _user(message: schema.UserMessage, names: dict[str, str], tools: Toolbox, path: str) -> list[Message]:
    if isinstance(message.content, str):
        return [Message("user", decode_content(message.content, tools, path))]
    results: list[ToolResultPart] = []
    visible: list[Any] = []
    for number, block in enumerate(message.content):
        if isinstance(block, schema.ToolResultBlock):
            results.append(decode_result(block, names, tools, f"{path}[{number}]"))
        else:
            visible += decode_block(block, tools, f"{path}[{number}]")
    messages = [Message("tool", (result,)) for result in results]
    return [*messages, Message("user", tuple(visible))] if visible or not results else messages


def _ends_in_text(messages: Sequence[Message]) -> bool:
    """Whether the client began the reply, which the model then continues."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or not last.parts:
        return False
    end = last.parts[-1]
    return isinstance(end, TextPart) and bool(end.text)


def _check_budget(body: schema.MessagesBody) -> None:
    if not isinstance(body.thinking, schema.ThinkingEnabled):
        return
    budget = body.thinking.budget_tokens
    if budget < MIN_BUDGET_TOKENS:
        raise InvalidParameter(
            f"`thinking.budget_tokens` must be at least {MIN_BUDGET_TOKENS}, got {shown(str(budget))}.",
            param="thinking.budget_tokens",
        )
    if budget >= body.max_tokens:
        raise InvalidParameter(
            "`thinking.budget_tokens` must be less than `max_tokens`.", param="thinking.budget_tokens"
        )


def _guide(body: schema.MessagesBody) -> Guide | None:
    config = None if body.output_config is None else body.output_config.format
    return one_guide(
        decode_format(config, "output_config.format", nested=False),
        decode_format(body.output_format, "output_format", nested=False),
    )


def _thinking(body: schema.CountTokensBody) -> Literal["auto", "on", "off"]:
    match body.thinking:
        case schema.ThinkingEnabled():
            return "on"
        case None:
            return "auto"
        case other:
            return "off" if other.type == "disabled" else "auto"


def _thinking_blocks(body: schema.MessagesBody, policy: ThinkingPolicy) -> ThinkingBlocks:
    if policy == "asked" and (body.thinking is None or body.thinking.type == "disabled"):
        return "hidden"
    return "sealed" if body.thinking is not None and body.thinking.display == "omitted" else "visible"


def _template_kwargs(body: schema.CountTokensBody) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    return {} if effort is None else {"reasoning_effort": effort}


def _stop(sequences: Sequence[str]) -> tuple[str, ...]:
    check_stop("stop_sequences", sequences)
    return tuple(sequences)
