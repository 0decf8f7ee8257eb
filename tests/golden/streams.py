"""The bytes of every kind of reply in every protocol, streamed and complete, from an engine that plays scripts."""

from typing import Any

import httpx

from tests.support.running import serving
from vllm_mlx.core.errors import (
    Cancelled,
    EngineDead,
    GenerationError,
    GrammarLimit,
    Overloaded,
    ShuttingDown,
    TimeLimit,
    TooManyRequests,
)
from vllm_mlx.core.events import (
    Failed,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from vllm_mlx.core.request import Request

from ..server.fakes import PROMPT_TOKENS, FakeEngine, Script
from .normal import normalised

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}]},
    "completions": {"model": "tiny", "prompt": "Hi."},
    "messages": {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi."}]},
    "responses": {"model": "tiny", "input": "Hi."},
}
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_FUNCTION = {"name": "ls", "description": "Lists a folder.", "parameters": _SCHEMA}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": _FUNCTION}],
    "messages": [{"name": "ls", "description": "Lists a folder.", "input_schema": _SCHEMA}],
    "responses": [{"type": "function", **_FUNCTION}],
}
THINKS: dict[str, dict[str, Any]] = {
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    "responses": {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
}
USAGE = Usage(prompt_tokens=PROMPT_TOKENS, cached_tokens=2, completion_tokens=9, reasoning_tokens=4)
STARTED = Started(PROMPT_TOKENS, 2)


def _ends(reason: FinishReason = FinishReason.STOP, stop: str | int | None = None) -> Finished:
    return Finished(reason, USAGE, stop)


CALLS: tuple[GenerationEvent, ...] = (
    ToolCallStart(0, "call_1a", "ls"),
    ToolCallDelta(0, '{"path":'),
    ToolCallDelta(0, ' "/"}'),
    ToolCallEnd(0),
    ToolCallStart(1, "call_1b", "ls"),
    ToolCallEnd(1),
)
REASONING = (ReasoningDelta("Need "), ReasoningDelta("files.\n"))
LOGPROBS = (
    TextDelta("A", (TokenLogprob(65, -0.25, ((65, -0.25), (66, -1.5))),)),
    TextDelta("é", (TokenLogprob(195, -0.5), TokenLogprob(169, 0.0))),
)
SCRIPTS: dict[str, Script] = {
    "text": (
        STARTED,
        PromptProgress(5, PROMPT_TOKENS),
        TextDelta('Look "here"'),
        TextDelta(" ü\n</end> & \\ 🙂"),
        _ends(),
    ),
    "empty": (STARTED, _ends()),
    "reasoning": (STARTED, *REASONING, TextDelta("Done."), _ends()),
    "reasoning only": (STARTED, *REASONING, _ends(FinishReason.LENGTH)),
    "tool calls": (STARTED, *CALLS, _ends(FinishReason.TOOL_CALLS)),
    "all": (STARTED, *REASONING, TextDelta("Looking. "), *CALLS, _ends(FinishReason.TOOL_CALLS)),
    "text between": (STARTED, TextDelta("a"), *REASONING, TextDelta("b"), *CALLS[:4], TextDelta("c"), _ends()),
    "call cut off": (STARTED, *CALLS[:2], _ends(FinishReason.LENGTH)),
    "stop string": (STARTED, TextDelta("one "), TextDelta("two"), _ends(stop="END")),
    "length": (STARTED, TextDelta("one "), _ends(FinishReason.LENGTH)),
    "clamped": (
        STARTED,
        TextDelta("one "),
        Finished(FinishReason.LENGTH, Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=9, clamped_max_tokens=30)),
    ),
    "logprobs": (STARTED, *LOGPROBS, _ends()),
    "error": (STARTED, *REASONING, TextDelta("Half "), Failed(GenerationError("It broke."))),
    "error at once": (Failed(GenerationError("It broke.")),),
    "cancelled": (STARTED, TextDelta("Half "), Failed(Cancelled())),
    "time limit": (STARTED, TextDelta("Half "), Failed(TimeLimit("It took too long."))),
    "overloaded": (STARTED, TextDelta("Half "), Failed(Overloaded("Busy.", retry_after_s=2))),
    "too many": (STARTED, TextDelta("Half "), Failed(TooManyRequests("Busy.", retry_after_s=2))),
    "grammar limit": (STARTED, TextDelta("Half "), Failed(GrammarLimit("Too much.", param="tools"))),
    "shutting down": (STARTED, TextDelta("Half "), Failed(ShuttingDown())),
    "engine dead": (STARTED, TextDelta("Half "), Failed(EngineDead("It has ended."))),
    "aborted": (STARTED, TextDelta("Half "), _ends(FinishReason.ABORT)),
}
# What a request has beside its text: protocol -> script -> fields.
FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "chat": {
        **{name: {"tools": TOOLS["chat"]} for name in ("tool calls", "all", "text between", "call cut off")},
        "stop string": {"stop": ["END"]},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
    },
    "completions": {"stop string": {"stop": "END"}, "logprobs": {"logprobs": 2}},
    "messages": {
        **{
            name: {"tools": TOOLS["messages"], **THINKS["messages"]}
            for name in ("tool calls", "all", "text between", "call cut off")
        },
        **dict.fromkeys(("reasoning", "reasoning only", "error"), THINKS["messages"]),
        "stop string": {"stop_sequences": ["END"]},
    },
    "responses": {
        **{
            name: {"tools": TOOLS["responses"], **THINKS["responses"]}
            for name in ("tool calls", "all", "text between", "call cut off")
        },
        **dict.fromkeys(("reasoning", "reasoning only", "error"), THINKS["responses"]),
    },
}
# Requests that play a script in another way: protocol -> name -> (script, fields).
OTHERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": {
        "usage": ("text", {"stream_options": {"include_usage": True}}),
        "all, with usage": ("all", {"tools": TOOLS["chat"], "stream_options": {"include_usage": True}}),
        "two choices": ("text", {"n": 2}),
        "reasoning inline": ("reasoning", {"separate_reasoning": False}),
        "no reasoning": ("reasoning", {"include_reasoning": False}),
    },
    "completions": {
        "usage": ("text", {"stream_options": {"include_usage": True}}),
        "two prompts": ("text", {"prompt": ["Hi.", "Ho."]}),
        "echo": ("text", {"echo": True}),
    },
    "messages": {
        "thinking not asked for": ("reasoning", {}),
        "thinking hidden": ("reasoning", {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
                                          "max_tokens": 2000}),
    },
    "responses": {
        "reasoning not sealed": ("reasoning", {}),
        "not stored": ("text", {"store": False}),
        "with all settings": ("text", {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5,
                                       "max_output_tokens": 99, "parallel_tool_calls": False, "top_p": 0.9}),
    },
}  # fmt: skip


def pages() -> dict[str, str]:
    """One page a protocol: each reply streamed, then complete."""
    played: list[Script] = [()]
    engine = FakeEngine(play=lambda request, index: _played(request, played[0]))
    with serving(engine) as running, running.http() as client:
        return {name: _page(client, name, played) for name in PATHS}


def _played(request: Request, script: Script) -> Script:
    """Only `completions` has neither reasoning nor calls: its engine sends text alone."""
    if request.messages is not None:
        return script
    return tuple(event for event in script if not isinstance(event, ReasoningDelta) and event not in CALLS)


def _page(client: httpx.Client, protocol: str, played: list[Script]) -> str:
    own = {name: (name, FIELDS[protocol].get(name, {})) for name in SCRIPTS}
    parts = []
    for name, (script, fields) in (own | OTHERS[protocol]).items():
        played[0] = SCRIPTS[script]
        for is_streamed in (True, False):
            body = {**ASKED[protocol], **fields, "stream": is_streamed}
            if not is_streamed:
                body.pop("stream_options", None)
            answer = client.post(PATHS[protocol], json=body)
            head = f"=== {name}, {'streamed' if is_streamed else 'complete'}: {answer.status_code}"
            parts.append(f"{head} {answer.headers['content-type']}\n{normalised(answer.content).rstrip()}\n")
    return "\n".join(parts)
