"""Messages and Responses over a tiny random checkpoint: from the socket to the tokens and back."""

import logging
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.support.rote import rote_checkpoint
from tests.support.rows import row
from tests.support.running import eventually

from .watched import engine_served

HI: Any = [{"role": "user", "content": "hi"}]
ASK: Any = {"model": "tiny", "max_tokens": 12, "messages": HI, "extra_body": {"temperature": 0}}


MODEL, SETTINGS = "qwen3", {"max_model_len": 256}


@pytest.mark.parametrize("fields", [{}, {"system": "Be brief."}, {"thinking": {"type": "disabled"}}])
def test_what_is_counted_is_what_runs(claude: anthropic.Anthropic, fields: Any) -> None:
    tools: Any = [{"name": "list_files", "input_schema": {"type": "object"}}]
    usage = claude.messages.create(**ASK, **fields, tools=tools).usage
    counted = claude.messages.count_tokens(model="tiny", messages=HI, tools=tools, **fields)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens > claude.messages.count_tokens(model="tiny", messages=HI, **fields).input_tokens


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_reasoning_that_was_not_sent_is_in_the_next_prompt(tmp_path: Path, stream: bool) -> None:
    """The model's template keeps the reasoning of a turn that called a tool, and so does the prefix cache."""
    path = rote_checkpoint(tmp_path, "qwen3", thought_tokens=40)
    template = TEMPLATE_VARIANTS["after the last question"]
    formats: Any = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "tool_grammar": "off"}
    ask: Any = {
        "model": "tiny",
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
        "tools": [{"name": "edit", "input_schema": {"type": "object"}}],
    }
    with (
        engine_served(path, chat_template=template, **formats) as server,
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
    path = rote_checkpoint(tmp_path, "qwen3", thought_tokens=40)
    with (
        engine_served(path, reasoning_parser="qwen3", max_silent_tokens=10) as server,
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
