"""The `openai` package against the server, over a real socket."""

import asyncio
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.support.rows import row
from tests.support.running import Running
from vllm_mlx.core.errors import ContextLengthExceeded, GenerationError, Overloaded
from vllm_mlx.core.events import (
    Failed,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.request import Request

from .fakes import FakeEngine, Pause, Script, finished, says

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


@pytest.fixture
def client(engine: FakeEngine, gpt: openai.OpenAI) -> openai.OpenAI:
    return gpt


def thinks_and_calls(request: Request, index: int) -> Script:
    return (
        Started(7, 2),
        ReasoningDelta("Need "),
        ReasoningDelta("files."),
        TextDelta("Looking."),
        ToolCallStart(0, "call_1", "ls"),
        ToolCallDelta(0, '{"path":'),
        ToolCallDelta(0, ' "/"}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call_2", "ls"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
        finished(FinishReason.TOOL_CALLS),
    )


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, temperature=0)
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "tiny" and reply.id == engine.requests[0].request_id
    assert reply.usage is not None and reply.usage.total_tokens == 9
    assert reply.usage.prompt_tokens_details is not None and reply.usage.prompt_tokens_details.cached_tokens == 2


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alias", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].model == "alias"
    assert last.choices == [] and last.usage is not None and last.usage.total_tokens == 9


@row("S0-2")
def test_tools_and_reasoning_streamed_are_the_whole_reply(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = thinks_and_calls
    whole = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion()
    message = whole.choices[0].message
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls if call.type == "function"] == [
        '{"path": "/"}',
        "{}",
    ]
    assert message.content == "Looking." and whole.choices[0].finish_reason == "tool_calls"
    assert message.reasoning_content == message.reasoning == "Need files."  # type: ignore[attr-defined]
    accumulated = streamed.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in accumulated["tool_calls"]:
        call.pop("index"), call["function"].pop("parsed_arguments", None)
    assert accumulated == message.model_dump(exclude_none=True)


def test_a_tool_round_trip(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = thinks_and_calls
    first = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "file"}
    client.chat.completions.create(
        model="tiny", messages=[*HI, first.choices[0].message.model_dump(), answer], tools=TOOLS
    )
    messages = engine.requests[-1].messages
    assert messages is not None and [message.role for message in messages] == ["user", "assistant", "tool"]


def test_several_choices(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: says(f"choice {index}")
    whole = client.chat.completions.create(model="tiny", messages=HI, n=3)
    assert [choice.message.content for choice in whole.choices] == ["choice 0", "choice 1", "choice 2"]
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "choice 0", 1: "choice 1", 2: "choice 2"}


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("A", (TokenLogprob(65, -0.5, ((65, -0.5),)),)), finished())
    logprobs = (
        client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=1).choices[0].logprobs
    )
    assert logprobs is not None and logprobs.content is not None
    assert (logprobs.content[0].token, logprobs.content[0].bytes) == ("A", [65])
    assert logprobs.content[0].top_logprobs[0].logprob == -0.5


def test_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: says(f"{request.prompt}/{index}")
    reply = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=5)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a/0"), (1, "a/1"), (2, "b/0"), (3, "b/1")]
    assert reply.usage is not None and reply.usage.prompt_tokens == 14
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="tiny", prompt=[[1], [2]], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "(1,)/0", 1: "(1,)/1", 2: "(2,)/0", 3: "(2,)/1"}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    model = client.models.retrieve("alias")
    assert (model.owned_by, model.created) == ("vllm-mlx", 1_700_000_000)
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")


def test_an_unknown_model_is_answered_with_the_known_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    assert "`gpt-9`" in caught.value.message and "`tiny`, `alias`" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_before_any_stream(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.refuse = ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 512 tokens. However" in caught.value.message


def test_an_overloaded_server_says_when_to_come_back(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.refuse = Overloaded("Too many requests wait.", retry_after_s=1.2)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "2"


def test_a_failure_is_a_500_in_a_whole_reply(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("a"), Failed(GenerationError("The row broke.")))
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HI)
    assert (caught.value.status_code, caught.value.type) == (500, "server_error")
    assert "The row broke." in caught.value.message


def test_a_failure_is_an_error_event_in_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("a"), Failed(GenerationError("The row broke.")))
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="The row broke"):
        for _ in stream:
            pass


def test_a_choice_that_fails_ends_its_siblings(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("a"), Failed(GenerationError("Broke.")) if index else Pause())
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=HI, n=2)
    assert len(engine.aborted) == 1


def test_an_aborted_reply_does_not_pass_for_a_whole_one(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: says("half", reason=FinishReason.ABORT)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=HI)
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))


def test_the_streaming_helper(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_completion()
    assert reply.choices[0].message.content == "Hello" and kinds[-1] == "content.done"


async def _stream_async(url: str) -> str | None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client,
        client.chat.completions.stream(model="tiny", messages=HI) as stream,
    ):
        return (await stream.get_final_completion()).choices[0].message.content


def test_the_asynchronous_streaming_helper(server: Running, engine: FakeEngine) -> None:
    assert asyncio.run(_stream_async(server.url)) == "Hello"


async def _ask_all(url: str) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        asked = [client.chat.completions.create(model="tiny", messages=HI) for _ in range(20)]
        return [reply.choices[0].message.content for reply in await asyncio.gather(*asked)]


def test_many_at_once(server: Running, engine: FakeEngine) -> None:
    assert asyncio.run(_ask_all(server.url)) == ["Hello"] * 20
    assert engine.running == set() and engine.aborted == []
