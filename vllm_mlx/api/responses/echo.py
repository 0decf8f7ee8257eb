"""The settings of a request that its response repeats, as they are used."""

from collections.abc import Mapping
from typing import Any

from ..guides import SchemaFormat
from . import schema

USUAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0}


def echo(body: schema.ResponsesBody, usual: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields. `usual`: the temperature and the top_p of requests that give none."""
    tools = [_echoed_tool(tool) for tool in body.tools or ()]
    choice = body.tool_choice
    reasoning, format_, extra = body.reasoning, None if body.text is None else body.text.format, body.model_extra or {}
    verbosity = None if body.text is None else (body.text.model_extra or {}).get("verbosity")
    return {
        **{name: usual[name] if (given := getattr(body, name)) is None else given for name in USUAL},
        **{name: getattr(body, name) or 0.0 for name in ("presence_penalty", "frequency_penalty")},
        **{name: extra.get(name) for name in ("safety_identifier", "prompt_cache_key", "user")},
        "top_logprobs": body.top_logprobs or 0,
        "max_tool_calls": body.max_tool_calls,
        "service_tier": "default",
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
        "text": {
            "format": {"type": "text"} if format_ is None else _echoed_format(format_),
            "verbosity": verbosity or "medium",
        },
        "tool_choice": "auto"
        if choice is None
        else choice
        if isinstance(choice, str)
        else choice.model_dump(exclude_unset=True),
        "tools": tools,
        "truncation": "disabled",
    }


def _echoed_format(format_: SchemaFormat) -> dict[str, Any]:
    fixed = {"description": None, "strict": True} if format_.type == "json_schema" else {}  # it is always enforced
    return {**fixed, **format_.model_dump(by_alias=True, exclude_unset=True)}


def _echoed_tool(tool: schema.AnyTool) -> dict[str, Any]:
    fixed = {"description": None, "parameters": None, "strict": False} if tool.type == "function" else {}
    return {**fixed, **tool.model_dump(exclude_unset=True, exclude_none=True)}
