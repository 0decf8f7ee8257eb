"""The `anthropic` package against the server, over a real socket."""

import asyncio
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from tests.support.rows import row
from tests.support.running import Running, serving
from vllm_mlx.core.errors import ContextLengthExceeded, GenerationError, Overloaded
from vllm_mlx.core.events import (
    Failed,
    Finished,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.messages import ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request

from .fakes import PROMPT_TOKENS, FakeEngine, Pause, Script, finished, says, usage

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "ls", "input_schema": {"type": "object"}}]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": HI}
ADAPTIVE: Any = {"type": "adaptive"}
BUDGET: Any = {"type": "enabled", "budget_tokens": 1024}
OFF: Any = {"type": "disabled"}


@pytest.fixture
def client(engine: FakeEngine, claude: anthropic.Anthropic) -> anthropic.Anthropic:
    return claude


def thinks_and_calls(request: Request, index: int) -> Script:
    return (
        Started(PROMPT_TOKENS, 2),
        PromptProgress(3, PROMPT_TOKENS),
        ReasoningDelta("Need "),
        ReasoningDelta("files.\n"),
        TextDelta("Looking."),
        ToolCallStart(0, "call_1", "ls"),
        ToolCallDelta(0, '{"path":'),
        ToolCallDelta(0, ' "/"}'),
        ToolCallEnd(0),
        Finished(FinishReason.TOOL_CALLS, replace(usage(9), reasoning_tokens=3)),
    )


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


def test_a_streamed_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "Hello"
        message = stream.get_final_message()
    assert message.usage.cache_read_input_tokens == 2 and message.stop_reason == "end_turn"


def test_the_beta_path(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    message = client.beta.messages.create(**ASK, betas=["interleaved-thinking-2025-05-14"])
    assert message.content[0].type == "text"


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
    call = message.content[-1]
    assert call.type == "tool_use" and call.id == "toolu_1" and call.input == {"path": "/"}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a"}]}
    said: Any = {"role": "assistant", "content": message.content}
    client.messages.create(model="tiny", max_tokens=50, messages=[*HI, said, result], tools=TOOLS)
    messages = engine.requests[-1].messages
    assert messages is not None
    assert messages[1].parts == (
        ReasoningPart("Need files.\n"),
        TextPart("Looking."),
        ToolCallPart("call_1", "ls", {"path": "/"}),
    )
    assert messages[2].parts == (ToolResultPart("call_1", (TextPart("a"),), "ls"),)


@pytest.mark.parametrize("fields", [{}, {"thinking": OFF}])
def test_thinking_that_was_not_asked_for_is_counted_and_not_sent(
    client: anthropic.Anthropic, engine: FakeEngine, fields: Any
) -> None:
    engine.play = thinks_and_calls
    whole = client.messages.create(**ASK, **fields, tools=TOOLS)
    with client.messages.stream(**ASK, **fields, tools=TOOLS) as stream:
        starts = [event for event in stream if event.type == "content_block_start"]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        text, call = message.content
        assert text.type == "text" and text.text == "Looking."
        assert call.type == "tool_use" and call.id == "toolu_1"
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == 3
    assert [(start.index, start.content_block.type) for start in starts] == [(0, "text"), (1, "tool_use")]


@pytest.mark.parametrize("thinking", [BUDGET, ADAPTIVE])
def test_thinking_that_was_asked_for_is_sent(client: anthropic.Anthropic, engine: FakeEngine, thinking: Any) -> None:
    engine.play = thinks_and_calls
    ask = {**ASK, "max_tokens": 2000, "thinking": thinking, "tools": TOOLS}
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**ask), streamed):
        thought, *_ = message.content
        assert thought.type == "thinking" and thought.thinking == "Need files.\n"


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


def test_pings_bridge_thinking_that_is_not_sent() -> None:
    thought = [each for number in range(20) for each in (ReasoningDelta(f"{number} "), Pause(0.02))]
    engine = FakeEngine(play=lambda request, index: (Started(7, 2), *thought, TextDelta("a"), finished()))
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        wire = client.post("/v1/messages", json={**ASK, "stream": True}).text
    names = [line.removeprefix("event: ") for line in wire.splitlines() if line.startswith("event: ")]
    before = names[: names.index("content_block_start")]
    assert before[0] == "message_start" and set(before[1:]) == {"ping"}


def test_the_tool_runner(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    """The package's own loop: call, result, answer."""

    @anthropic.beta_tool
    def ls(path: str) -> str:
        """List a folder."""
        return f"files of {path}"

    engine.play = lambda request, index: (
        says("Two files.") if request.messages and request.messages[-1].role == "tool" else thinks_and_calls(request, 0)
    )
    runner = client.beta.messages.tool_runner(**ASK, tools=[ls])
    *_, last = runner
    assert last.content[0].type == "text" and last.content[0].text == "Two files."
    messages = engine.requests[-1].messages
    assert messages is not None
    result = messages[-1].parts[0]
    assert isinstance(result, ToolResultPart) and result.content == (TextPart("files of /"),)
    # The package asks the server to keep the conversation. It is refused, and then sends the complete one.
    assert [message.role for message in messages] == ["user", "assistant", "tool"]


@row("S4-1")
def test_count_tokens(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI, tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == PROMPT_TOKENS
    client.messages.create(**ASK, tools=TOOLS, system="Be brief.")
    [count], [run] = engine.counted, engine.requests
    assert (count.messages, count.tools, count.thinking) == (run.messages, run.tools, run.thinking)


async def _count_all(url: str) -> list[int]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        asked = [client.messages.count_tokens(model="tiny", messages=HI) for _ in range(27)]
        return [each.input_tokens for each in await asyncio.gather(*asked)]


def test_many_counts_at_once(server: Running, engine: FakeEngine) -> None:
    """As Claude Code asks for them to show what fills its context."""
    assert asyncio.run(_count_all(server.url)) == [PROMPT_TOKENS] * 27
    assert engine.requests == []


async def _stream_async(url: str) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client,
        client.messages.stream(**ASK) as stream,
    ):
        return await stream.get_final_text()


def test_the_asynchronous_client(server: Running, engine: FakeEngine) -> None:
    assert asyncio.run(_stream_async(server.url)) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_before_any_stream(
    client: anthropic.Anthropic, engine: FakeEngine, stream: bool
) -> None:
    engine.refuse = ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK, stream=stream)
    body: Any = caught.value.body
    assert body["error"]["message"] == "prompt is too long: 600 tokens > 512 maximum"


def test_errors_are_the_package_s_own(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "claude-9"})
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 5})
    engine.refuse = Overloaded("Too many requests wait.", retry_after_s=1.2)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**ASK)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "2"
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "Too many requests wait."},
        "request_id": caught.value.request_id,
    }


def test_a_failure_is_a_500_in_a_whole_reply_and_an_event_in_a_stream(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    engine.play = lambda request, index: (Started(7, 0), TextDelta("a"), Failed(GenerationError("The row broke.")))
    with pytest.raises(anthropic.InternalServerError, match="The row broke"):
        client.messages.create(**ASK)
    with pytest.raises(anthropic.APIStatusError, match="The row broke"), client.messages.stream(**ASK) as stream:
        stream.get_final_message()


def test_silence_is_broken_by_pings_in_the_prefill_too() -> None:
    names: list[str] = []

    def pings(number: int) -> Pause:
        return Pause(until=lambda: names.count("ping") >= number)

    engine = FakeEngine(
        play=lambda request, index: (
            pings(2),
            Started(PROMPT_TOKENS, 2),
            PromptProgress(3, PROMPT_TOKENS),
            pings(4),
            TextDelta("a"),
            pings(8),
            finished(),
        )
    )
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        with client.stream("POST", "/v1/messages", json={**ASK, "stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
        with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as vendor:
            assert vendor.messages.create(**ASK).content[0].type == "text"
            with vendor.messages.stream(**ASK) as stream:
                assert stream.get_final_text() == "a"
    assert names[:2] == ["message_start", "ping"]
    text = names.index("content_block_start")
    assert names[:text].count("ping") >= 4 and names[text:].count("ping") > 0
    assert [name for name in names if name != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_what_never_reaches_a_route_is_in_the_envelope_too() -> None:
    settings: Any = {"api_keys": ("right",), "max_body_bytes": 1000}
    with serving(FakeEngine(), **settings) as server, server.http(headers={"x-api-key": "right"}) as client:
        as_json = {"content-type": "application/json"}
        answers = {
            "authentication_error": client.post("/v1/messages", json=ASK, headers={"x-api-key": "wrong"}),
            "not_found_error": client.get("/v1/messages/unknown"),
            "request_too_large": client.post("/v1/messages", json={**ASK, "system": "x" * 2000}),
            "invalid_request_error": client.post("/v1/messages", content=b"{bad", headers=as_json),
        }
        wrong_method = client.get("/v1/messages")
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0).messages.create(**ASK)
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="right", api_key=None, max_retries=0)
        assert bearer.messages.create(**ASK).role == "assistant"
        assert client.get("/v1/models", headers={"x-api-key": "wrong"}).json()["error"]["code"] == "invalid_api_key"
    for kind, answer in answers.items():
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"} and (body["type"], body["error"]["type"]) == ("error", kind)
    assert wrong_method.status_code == 405 and wrong_method.json()["type"] == "error"


def test_missing_fields_are_named(server: Running, engine: FakeEngine) -> None:
    with server.http() as client:
        answer = client.post("/v1/messages", json={"model": "tiny", "messages": HI})
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": "`max_tokens` is required."}


def test_a_probe_is_harmless(server: Running) -> None:
    with server.http() as client:
        for path in ("/", "/api/hello"):
            assert client.head(path).status_code == 200 and client.get(path).status_code == 200


def test_models_in_anthropic_s_form(client: anthropic.Anthropic) -> None:
    models = client.models.list(limit=1000)
    assert [model.id for model in models] == ["tiny", "alias"]
    model = client.models.retrieve("alias")
    assert (model.display_name, model.max_input_tokens, model.created_at.year) == ("alias", 512, 2023)
