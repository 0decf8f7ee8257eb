"""Messages and Responses over a tiny random checkpoint: from the socket to the tokens and back."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.support.rote import rote_checkpoint
from tests.support.rows import row
from tests.support.running import Running, eventually, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

HI: Any = [{"role": "user", "content": "hi"}]
ASK: Any = {"model": "tiny", "max_tokens": 12, "messages": HI, "extra_body": {"temperature": 0}}
RESPOND: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path]) -> Iterator[Running]:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=256))
    with serving(engine) as running:
        yield running


def content(message: Any) -> Any:
    return [(block.type, getattr(block, "text", None), getattr(block, "thinking", None)) for block in message.content]


def test_a_streamed_message_is_the_whole_one(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    assert content(streamed) == content(whole) and streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0


@pytest.mark.parametrize("fields", [{}, {"system": "Be brief."}, {"thinking": {"type": "disabled"}}])
def test_what_is_counted_is_what_runs(claude: anthropic.Anthropic, fields: Any) -> None:
    tools: Any = [{"name": "list_files", "input_schema": {"type": "object"}}]
    usage = claude.messages.create(**ASK, **fields, tools=tools).usage
    counted = claude.messages.count_tokens(model="tiny", messages=HI, tools=tools, **fields)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens > claude.messages.count_tokens(model="tiny", messages=HI, **fields).input_tokens


def test_a_prompt_that_does_not_fit_is_counted_and_refused(claude: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 2000}]
    counted = claude.messages.count_tokens(model="tiny", messages=long).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=5, messages=long, stream=True)
    body: Any = caught.value.body
    assert body["error"]["message"] == f"prompt is too long: {counted} tokens > 256 maximum"


def test_a_limit_beyond_the_context_is_cut(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="tiny", max_tokens=20_000, messages=HI)
    usage = message.usage
    num_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    assert num_tokens <= 256
    assert message.stop_reason == ("model_context_window_exceeded" if num_tokens == 256 else "end_turn")


def test_cache_marks_and_billing_do_not_change_the_prompt(claude: anthropic.Anthropic) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3;"}
    marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    counts = {
        claude.messages.count_tokens(model="tiny", messages=HI, system=system).input_tokens
        for system in ("Be brief.", [marked], [billing, marked])
    }
    assert len(counts) == 1


def test_a_streamed_response_is_the_whole_one(gpt: openai.OpenAI) -> None:
    whole = gpt.responses.create(**RESPOND)
    with gpt.responses.stream(**RESPOND) as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete") and last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert whole.usage is not None and last.response.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens > 0


def test_a_stored_response_is_gone_on_from(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(**RESPOND)
    second = gpt.responses.create(**{**RESPOND, "input": "more"}, previous_response_id=first.id)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_response_that_does_not_fit_is_refused(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="tiny", input="word " * 2000, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_reasoning_that_was_not_sent_is_in_the_next_prompt(tmp_path: Path, stream: bool) -> None:
    """The model's template keeps the reasoning of a turn that called a tool, and so does the prefix cache."""
    config = EngineConfig(
        model=str(rote_checkpoint(tmp_path, "qwen3", thought_tokens=40)),
        chat_template=TEMPLATE_VARIANTS["after the last question"],
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        tool_grammar="off",
        memory_budget_bytes=4 << 30,
    )
    ask: Any = {
        "model": "tiny",
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
        "tools": [{"name": "edit", "input_schema": {"type": "object"}}],
    }
    with (
        serving(start_engine(config)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as claude,
    ):
        if stream:
            with claude.messages.stream(**ask, messages=HI) as events:
                first = events.get_final_message()
        else:
            first = claude.messages.create(**ask, messages=HI)
        [call] = first.content
        assert call.type == "tool_use" and first.usage.output_tokens_details is not None
        assert first.usage.output_tokens_details.thinking_tokens >= 40
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        usage = claude.messages.create(**ask, messages=messages).usage
    assert usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens


@row("S3-20")
def test_a_reply_that_only_reasons_ends_at_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends as at `max_tokens`, in the words of each protocol, and its row is free for others."""
    caplog.set_level(logging.INFO)
    config = EngineConfig(
        model=str(rote_checkpoint(tmp_path, "qwen3", thought_tokens=40)),
        reasoning_parser="qwen3",
        max_silent_tokens=10,
        memory_budget_bytes=4 << 30,
    )
    with (
        serving(start_engine(config)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as claude,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as gpt,
    ):
        message = claude.messages.create(model="tiny", max_tokens=100, messages=HI)
        response = gpt.responses.create(model="tiny", input="hi")
        chat = gpt.chat.completions.create(model="tiny", messages=HI)
        with server.http() as http:
            eventually(lambda: http.get("/v1/status").json()["num_running"] == 0)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 10)
    assert response.usage is not None and response.incomplete_details is not None
    assert (response.incomplete_details.reason, response.usage.output_tokens) == ("max_output_tokens", 10)
    assert chat.usage is not None
    assert (chat.choices[0].finish_reason, chat.usage.completion_tokens) == ("length", 10)
    assert caplog.text.count("ends after 10 tokens without an answer (--max-silent-tokens)") == 3


def test_a_reply_that_the_client_began_is_gone_on_with(claude: anthropic.Anthropic) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "Hello"}]
    counted = claude.messages.count_tokens(model="tiny", messages=begun).input_tokens
    asked = claude.messages.count_tokens(model="tiny", messages=HI).input_tokens
    usage = claude.messages.create(**{**ASK, "messages": begun}).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted != asked


def test_a_round_trip_with_a_tool_and_a_system_message_in_the_middle(claude: anthropic.Anthropic) -> None:
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "/"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a"}]}
    messages: Any = [
        *HI,
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, call]},
        {"role": "user", "content": [result]},
    ]
    tools: Any = [{"name": "ls", "input_schema": {"type": "object"}}]
    message = claude.messages.create(**{**ASK, "messages": messages}, tools=tools)
    assert message.usage.output_tokens > 0


def test_a_picture_is_refused_by_a_model_that_takes_none(claude: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    picture: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="takes no images"):
        claude.messages.create(**{**ASK, "messages": picture})


def test_a_client_that_alters_its_system_prompt_is_told_of_in_the_log(
    claude: anthropic.Anthropic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm_mlx.requests")
    first = claude.messages.create(**ASK, system="Version 1.", thinking={"type": "disabled"})
    said: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    for version, altered in (("1", None), ("2", "message at token")):
        fields: Any = {"system": f"Version {version}.", "thinking": {"type": "disabled"}}
        reply = claude.messages.create(**{**ASK, "messages": said}, **fields)
        eventually(lambda: f"reply={reply.id} " in caplog.text)  # noqa: B023
        [line] = [line for line in caplog.text.splitlines() if f"reply={reply.id} " in line]
        assert ("altered=" in line) == (altered is not None) and (altered or "") in line
