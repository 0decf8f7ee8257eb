"""The `anthropic` package against the server, over a real socket."""

from typing import Any

import anthropic
import pytest

from tests.support.rows import row
from tests.support.running import serving
from vllm_mlx.core.errors import Overloaded
from vllm_mlx.core.events import FinishReason, ReasoningDelta, Started
from vllm_mlx.core.messages import TextPart, ToolResultPart

from .fakes import PROMPT_TOKENS, REPLY, FakeEngine, finished, thinks_and_calls

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "ls", "input_schema": {"type": "object"}}]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": HI}
ADAPTIVE: Any = {"type": "adaptive"}


@pytest.fixture
def client(engine: FakeEngine, claude: anthropic.Anthropic) -> anthropic.Anthropic:
    return claude


@row("S4-1")
def test_a_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    message = client.messages.create(**ASK, extra_body={"temperature": 0})
    [block] = message.content
    assert block.type == "text" and block.text == "Hello"
    assert (message.stop_reason, message.model, message.role) == ("end_turn", "tiny", "assistant")
    assert message.id == engine.requests[0].request_id
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 2, 2)


def test_the_request_has_an_id_that_the_package_finds(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    assert client.messages.create(**ASK, extra_headers={"x-request-id": "mine"})._request_id == "mine"
    engine.refuse = Overloaded("Too many requests wait.", retry_after_s=1.2)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**ASK)
    assert (caught.value.request_id or "").startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_trip_with_a_tool(client: anthropic.Anthropic, engine: FakeEngine, stream: bool) -> None:
    """What the package sends back is what the model said, to the last blank."""
    engine.play = thinks_and_calls
    if stream:
        with client.messages.stream(**ASK, tools=TOOLS, thinking=ADAPTIVE) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**ASK, tools=TOOLS, thinking=ADAPTIVE)
    assert message.stop_reason == "tool_use"
    *_, call, other = message.content
    assert call.type == "tool_use" and call.id == "toolu_1" and call.input == {"path": "/"}
    results: Any = [{"type": "tool_result", "tool_use_id": each.id, "content": "a"} for each in (call, other)]
    said: Any = [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    client.messages.create(model="tiny", max_tokens=50, messages=[*HI, *said], tools=TOOLS)
    messages = engine.requests[-1].messages
    assert messages is not None
    assert messages[1].parts == REPLY
    assert messages[2].parts == (ToolResultPart("call_1", (TextPart("a"),), "ls"),)


def test_a_server_may_send_thinking_always() -> None:
    with (
        serving(FakeEngine(play=thinks_and_calls), messages_thinking="always") as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        assert client.messages.create(**ASK, tools=TOOLS).content[0].type == "thinking"


def test_a_reply_that_only_thought_has_an_empty_text(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    """Programs that read `content[0].text` go on reading."""
    engine.play = lambda request, index: (
        Started(PROMPT_TOKENS, 2),
        ReasoningDelta("Hm."),
        finished(FinishReason.LENGTH),
    )
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**ASK), streamed):
        [block] = message.content
        assert block.type == "text" and block.text == "" and message.stop_reason == "max_tokens"


@row("S4-1")
def test_count_tokens(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI, tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == PROMPT_TOKENS
    client.messages.create(**ASK, tools=TOOLS, system="Be brief.")
    [count], [run] = engine.counted, engine.requests
    assert (count.messages, count.tools, count.thinking) == (run.messages, run.tools, run.thinking)


def test_models_in_anthropic_s_form(client: anthropic.Anthropic) -> None:
    models = client.models.list(limit=1000)
    assert [model.id for model in models] == ["tiny", "alias"]
    model = client.models.retrieve("alias")
    assert (model.display_name, model.max_input_tokens, model.created_at.year) == ("alias", 512, 2023)
