"""Typed objects and forced calls through the vendors' own clients, from a checkpoint that knows nothing."""

import json
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.rows import row
from vllm_mlx.cli.remote import events_of

HI: Any = [{"role": "user", "content": "hi"}]
WITH_USAGE: Any = {"stream_options": {"include_usage": True}}
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}
MODEL, SETTINGS = "qwen3_5", {"max_model_len": 2048}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    color: Literal["red", "blue"]


SCHEMA = Person.model_json_schema()
FUNCTION: Any = {"type": "function", "function": {"name": "save", "parameters": SCHEMA, "strict": True}}
CUSTOM: Any = {"name": "save", "input_schema": SCHEMA}


def test_openai_parses_a_chat_whole_and_streamed(gpt: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": HI, "response_format": Person, "max_tokens": 200, "extra_body": OFF}
    whole = gpt.chat.completions.parse(**ask).choices[0].message.parsed
    with gpt.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(whole, Person) and streamed == whole


def test_openai_parses_a_response(gpt: openai.OpenAI) -> None:
    reply = gpt.responses.parse(model="tiny", input="hi", text_format=Person, max_output_tokens=200, extra_body=OFF)
    assert isinstance(reply.output_parsed, Person)


def test_openai_parses_the_arguments_of_a_forced_call(gpt: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Person, name="save")]
    reply = gpt.chat.completions.parse(
        model="tiny", messages=HI, tools=tools, tool_choice="required", max_tokens=600, extra_body=OFF
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert all(isinstance(call.function.parsed_arguments, Person) for call in choice.message.tool_calls or [])


@row("S0-9", "S1-1", "S3-18")
def test_a_named_tool_behind_a_thought_of_nine_tokens(gpt: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "save"}}
    reply = gpt.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[FUNCTION],
        tool_choice=named,
        max_tokens=400,
        extra_body={"thinking_token_budget": 9},
    )
    [call] = reply.choices[0].message.tool_calls or []
    Person.model_validate_json(call.function.arguments)
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 9


@row("S1-1", "S2-14")
@pytest.mark.parametrize("stream", [False, True])
def test_hidden_reasoning_is_reasoning_all_the_same(http: httpx.Client, stream: bool) -> None:
    """The grammar bounds the answer alone: the same tokens are sampled, and the thought is not sent."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"messages": HI, "response_format": form, "thinking_token_budget": 7, "temperature": 0, "max_tokens": 300}
    shown = http.post("/v1/chat/completions", json=body).json()
    hidden = hidden_reply(http, {**body, "include_reasoning": False}, stream)
    message, usage = shown["choices"][0]["message"], shown["usage"]
    assert message["reasoning_content"] and usage["completion_tokens_details"]["reasoning_tokens"] == 7
    assert hidden == {"content": message["content"], "reasoning": "", "usage": usage["completion_tokens"]}
    Person.model_validate_json(message["content"])


def hidden_reply(client: httpx.Client, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    if not stream:
        reply = client.post("/v1/chat/completions", json=body).json()
        pieces = [reply["choices"][0]["message"]]
    else:
        answer = client.post("/v1/chat/completions", json={**body, "stream": True, **WITH_USAGE})
        events = list(events_of(answer.text.splitlines()))
        reply, pieces = events[-1], [choice["delta"] for event in events for choice in event["choices"]]
    return {
        "content": "".join(piece.get("content") or "" for piece in pieces),
        "reasoning": "".join(piece.get(name) or "" for piece in pieces for name in ("reasoning", "reasoning_content")),
        "usage": reply["usage"]["completion_tokens"],
    }


def test_a_forced_call_of_responses(gpt: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "save", "parameters": SCHEMA, "strict": True}
    reply = gpt.responses.create(
        model="tiny", input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, extra_body=OFF
    )
    [call] = [item for item in reply.output if item.type == "function_call"]
    Person.model_validate_json(call.arguments)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "save"}]
)
def test_a_forced_call_of_messages(claude: anthropic.Anthropic, choice: Any) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 400, "messages": HI, "tools": [CUSTOM], "tool_choice": choice}
    off: Any = {"type": "disabled"}
    [block] = claude.messages.create(**ask, thinking=off).content
    assert block.type == "tool_use"
    Person.model_validate(block.input)
    with claude.messages.stream(**ask, thinking=off) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == block.input


@pytest.mark.full
def test_a_budget_of_messages_is_kept(claude: anthropic.Anthropic) -> None:
    """`</think>` never comes by itself here: the thought is the budget, its end and the answer the rest."""
    format_: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    reply = claude.messages.create(
        model="tiny", max_tokens=1400, messages=HI, thinking=thinking, extra_body={"output_config": format_}
    )
    thought, text = reply.content
    assert thought.type == "thinking" and text.type == "text"
    Person.model_validate_json(text.text)
    assert reply.usage.output_tokens <= 1024 + 1 + 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_is_refused_before_any_output(gpt: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="keyword `uniqueItems`") as caught:
        gpt.chat.completions.create(model="tiny", messages=HI, response_format=format_, stream=stream)
    assert caught.value.param == "response_format.json_schema.schema.properties.a.uniqueItems"


def test_choices_and_patterns_of_completions(gpt: openai.OpenAI) -> None:
    def text(**guide: Any) -> str:
        body = {"structured_outputs": guide}
        return gpt.completions.create(model="tiny", prompt="Pick", max_tokens=40, extra_body=body).choices[0].text

    assert text(choice=["yes", "no"]) in ("yes", "no")
    assert json.loads(text(regex=r"\[\d{2}\]"))[0] < 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_beyond_a_limit_is_the_clients_error(gpt: openai.OpenAI, stream: bool) -> None:
    crowded = f'start: "{"b" * 40}" /[a-z]/ (' + " | ".join(f'"a{number:04}"' for number in range(2500)) + ")"
    body = {"structured_outputs": {"grammar": crowded}}
    with pytest.raises(openai.APIError, match="cannot be guided") as caught:
        reply = gpt.completions.create(model="tiny", prompt="Go", max_tokens=90, stream=stream, extra_body=body)
        list(reply)
    assert (caught.value.code, caught.value.param) == ("grammar_limit", "structured_outputs.grammar")
    assert caught.value.type == "invalid_request_error"
    assert stream or isinstance(caught.value, openai.BadRequestError)
