"""The `openai` package against the server, over a real socket."""

from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.support.rows import row
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import (
    Failed,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
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


def test_a_choice_that_fails_ends_its_siblings(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("a"), Failed(GenerationError("Broke.")) if index else Pause())
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=HI, n=2)
    assert len(engine.aborted) == 1
