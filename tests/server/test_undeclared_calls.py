"""A call of an undeclared tool over each protocol: the next turn computes no token of it again."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.support.rote import CALL, rote_checkpoint
from tests.support.rows import row
from tests.support.running import Running

from .watched import engine_served

SCHEMA: Any = {"type": "object"}
Counts = tuple[int, int]  # tokens of the first turn, cached tokens of the second


@pytest.fixture(scope="module", params=["text", "call"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(mode: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = rote_checkpoint(tmp_path_factory.mktemp("rote"), "qwen3", thought_tokens=4)
    formats = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "tool_grammar": "off"}
    template = TEMPLATE_VARIANTS["keeps reasoning"]
    with engine_served(path, chat_template=template, undeclared_calls=mode, **formats) as running:
        yield running


def messages(claude: anthropic.Anthropic, start: str, mode: str, stream: bool) -> Counts:
    ask: Any = {"model": "tiny", "max_tokens": 50, "tools": [{"name": "other", "input_schema": SCHEMA}]}
    said: Any = [{"role": "user", "content": start}]
    if stream:
        with claude.messages.stream(**ask, messages=said) as events:
            first = events.get_final_message()
    else:
        first = claude.messages.create(**ask, messages=said)
    block = first.content[-1]
    next: Any = "more"
    if mode == "call":
        assert block.type == "tool_use" and block.name == "edit"
        next = [{"type": "tool_result", "tool_use_id": block.id, "content": "more"}]
    else:
        assert block.type == "text" and block.text == CALL
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": next}]
    usage = claude.messages.create(**ask, messages=said).usage
    num_prompt_tokens = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    return num_prompt_tokens + first.usage.output_tokens, usage.cache_read_input_tokens or 0


def chat(gpt: openai.OpenAI, start: str, mode: str, stream: bool) -> Counts:
    ask: Any = {"model": "tiny", "tools": [{"type": "function", "function": {"name": "other", "parameters": SCHEMA}}]}
    said: Any = [{"role": "user", "content": start}]
    if stream:
        with gpt.chat.completions.stream(**ask, messages=said, stream_options={"include_usage": True}) as events:
            first: Any = events.get_final_completion()
    else:
        first = gpt.chat.completions.create(**ask, messages=said)
    message = first.choices[0].message
    said.append({"role": "assistant", "content": message.content})
    if mode == "call":
        [call] = message.tool_calls
        said[-1]["tool_calls"] = [{"id": call.id, "type": "function", "function": dict(call.function)}]
        said.append({"role": "tool", "tool_call_id": call.id, "content": "more"})
    else:
        assert message.content == CALL
        said.append({"role": "user", "content": "more"})
    usage = gpt.chat.completions.create(**ask, messages=said).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return first.usage.total_tokens, usage.prompt_tokens_details.cached_tokens or 0


def responses(gpt: openai.OpenAI, start: str, mode: str, stream: bool, *, is_stored: bool = False) -> Counts:
    ask: Any = {"model": "tiny", "tools": [{"type": "function", "name": "other", "parameters": SCHEMA}]}
    said: Any = [{"role": "user", "content": start}]
    if stream:
        with gpt.responses.stream(**ask, input=said) as events:
            first: Any = events.get_final_response()
    else:
        first = gpt.responses.create(**ask, input=said)
    result: Any = {"role": "user", "content": "more"}
    if mode == "call":
        assert first.output[-1].name == "edit"
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "more"}
    else:
        assert json.loads(first.output_text) == json.loads(CALL)
    if is_stored:
        usage = gpt.responses.create(**ask, input=[result], previous_response_id=first.id).usage
    else:
        said += [item.model_dump(exclude_none=True) for item in first.output]
        usage = gpt.responses.create(**ask, input=[*said, result]).usage
    assert usage is not None
    return first.usage.total_tokens, usage.input_tokens_details.cached_tokens


@row("S0-11")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["messages", "chat", "responses", "stored responses"])
def test_the_next_turn_computes_nothing_of_it_again(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, mode: str, protocol: str, stream: bool
) -> None:
    ways: dict[str, Callable[[str], Counts]] = {
        "messages": lambda start: messages(claude, start, mode, stream),
        "chat": lambda start: chat(gpt, start, mode, stream),
        "responses": lambda start: responses(gpt, start, mode, stream),
        "stored responses": lambda start: responses(gpt, start, mode, stream, is_stored=True),
    }
    num_tokens, num_cached = ways[protocol](f"{protocol} {stream}")
    assert num_cached == num_tokens
