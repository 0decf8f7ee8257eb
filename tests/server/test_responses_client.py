"""The `openai` package's Responses against the server, over a real socket."""

from typing import Any

import openai
import pytest

from tests.support.running import eventually, serving
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import (
    Failed,
    FinishReason,
    Started,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.messages import Message, TextPart, ToolCallPart, ToolResultPart

from .fakes import PROMPT_TOKENS, REPLY, FakeEngine, Pause, finished, hello, says, thinks_and_calls

TOOLS: Any = [
    {"type": "function", "name": "ls", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "multi", "tools": [{"type": "function", "name": "wait"}]},
    {"type": "web_search"},
]
ASK: Any = {"model": "tiny", "input": "hi"}


@pytest.fixture
def client(engine: FakeEngine, gpt: openai.OpenAI) -> openai.OpenAI:
    return gpt


def messages_of(engine: FakeEngine) -> tuple[Message, ...]:
    messages = engine.requests[-1].messages
    assert messages is not None
    return messages


@pytest.mark.parametrize("store", [False, True])
def test_a_round_trip_with_tools(client: openai.OpenAI, engine: FakeEngine, store: bool) -> None:
    """Stateless or stored, the next prompt goes on from what was said, to the last blank."""
    engine.play = thinks_and_calls
    reply: Any = client.responses.create(**ASK, tools=TOOLS, store=store, include=["reasoning.encrypted_content"])
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.name} for item in reply.output[2:]
    ]
    said: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in reply.output)]
    client.responses.create(
        model="tiny",
        tools=TOOLS,
        input=results if store else [*said, *results],
        **({"previous_response_id": reply.id} if store else {}),
    )
    assert messages_of(engine) == (
        Message("user", (TextPart("hi"),)),
        Message("assistant", REPLY),
        Message("tool", (ToolResultPart("call_1", (TextPart("ls"),), "ls"),)),
        Message("tool", (ToolResultPart("call_2", (TextPart("wait"),), "multi__wait"),)),
    )


@pytest.mark.parametrize("store", [False, True])
def test_a_round_trip_with_a_custom_tool(client: openai.OpenAI, engine: FakeEngine, store: bool) -> None:
    engine.play = lambda request, index: (
        Started(PROMPT_TOKENS, 2),
        ToolCallStart(0, "call_1", "apply_patch"),
        ToolCallDelta(0, '{"input": "*** Begin"}'),
        ToolCallEnd(0),
        finished(FinishReason.TOOL_CALLS),
    )
    tools: Any = [{"type": "custom", "name": "apply_patch"}]
    with client.responses.stream(**ASK, tools=tools, store=store) as stream:
        reply = stream.get_final_response()
    [call] = reply.output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("apply_patch", "*** Begin")
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    said: Any = [{"role": "user", "content": "hi"}, call.to_dict()]
    again: Any = {"previous_response_id": reply.id, "input": [result]} if store else {"input": [*said, result]}
    client.responses.create(model="tiny", tools=tools, **again)
    assert messages_of(engine)[1:] == (
        Message("assistant", (ToolCallPart("call_1", "apply_patch", {"input": "*** Begin"}),)),
        Message("tool", (ToolResultPart("call_1", (TextPart("done"),), "apply_patch"),)),
    )


def test_references_to_stored_items(client: openai.OpenAI, engine: FakeEngine) -> None:
    reply = client.responses.create(**ASK)
    reference: Any = {"type": "item_reference", "id": reply.output[0].id}
    client.responses.create(model="tiny", input=[reference, {"role": "user", "content": "more"}])
    assert messages_of(engine)[0] == Message("assistant", (TextPart("Hello"),))
    bare: Any = {"id": reply.output[0].id}  # an id without a type is a reference
    client.responses.create(model="tiny", input=[bare, {"role": "user", "content": "more"}])
    assert messages_of(engine)[0] == Message("assistant", (TextPart("Hello"),))
    for lost in ({"type": "item_reference", "id": "msg_x"}, {"id": "msg_x"}):
        with pytest.raises(openai.NotFoundError, match="no item `msg_x` is stored") as caught:
            client.responses.create(model="tiny", input=[lost])
        assert (caught.value.code, caught.value.param) == (None, "input[0]")


BAD_ITEMS: Any = {
    "": {"type": "item_reference", "id": "msg_x"},
    ".type": {"type": "tomorrow_call"},
    ".content[0]": {"role": "user", "content": [{"type": "input_image", "file_id": "file_x"}]},
    ".output[0]": {
        "type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "detail": "low"}]
    },
}  # fmt: skip


@pytest.mark.parametrize("place", BAD_ITEMS)
def test_errors_count_the_items_of_the_request_alone(client: openai.OpenAI, engine: FakeEngine, place: str) -> None:
    """Not those of the conversation that the request continues, of which the client sends none."""
    first = client.responses.create(**ASK)
    second = client.responses.create(model="tiny", input="and?", previous_response_id=first.id)
    for options in ({}, {"previous_response_id": second.id}):
        bad: Any = [{"role": "user", "content": "so"}, BAD_ITEMS[place]]
        with pytest.raises(openai.NotFoundError if place == "" else openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=bad, **options)
        assert caught.value.param == f"input[1]{place}" and f"`input[1]{place}" in caught.value.message


def test_a_response_that_cannot_be_stored_is_refused_before_it_runs() -> None:
    """Each of many keys has a small share of the memory. A reply that begins is stored, however long it becomes."""
    engine = FakeEngine()
    with serving(engine, api_keys=tuple(f"key {number}" for number in range(4000))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key 7", max_retries=0)
        for options in ({}, {"background": True}, {"stream": True}):
            with pytest.raises(openai.BadRequestError, match=r"too large to be stored: .* `store` to false") as caught:
                client.responses.create(model="tiny", input="x" * 100_000, **options)
            assert caught.value.param == "input" and not engine.requests
        assert client.responses.create(model="tiny", input="x" * 100_000, store=False).output_text == "Hello"
        engine.play = lambda request, index: says("y" * 100_000)
        for options in ({}, {"background": True}):
            made: Any = client.responses.create(model="tiny", input="x" * 50_000, **options)
            eventually(lambda: client.responses.retrieve(made.id).status == "completed")  # noqa: B023
            assert len(client.responses.retrieve(made.id).output_text) == 100_000
        engine.play = hello
        client.responses.create(model="tiny", input="so?", previous_response_id=made.id)


def test_stored_responses_are_read_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(model="tiny", input="and?", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == "Hello"
    items: Any = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert items.has_more and len(list(items)) == 3
    listed = list(client.responses.input_items.list(second.id))
    assert [item.type for item in listed] == ["message"] * 3
    assert len({item.id for item in listed}) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="No response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="`limit`"):
        client.responses.input_items.list(second.id, limit=0)


def test_a_response_that_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ASK, store=False)
    for look in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            look(reply.id)


def test_a_streamed_response_is_stored_too(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK) as stream:
        reply = stream.get_final_response()
    assert client.responses.retrieve(reply.id).output_text == "Hello"


def test_in_the_background(client: openai.OpenAI, engine: FakeEngine) -> None:
    queued = client.responses.create(**ASK, background=True)
    assert queued.status == "queued"
    eventually(lambda: client.responses.retrieve(queued.id).status == "completed")
    done = client.responses.cancel(queued.id)
    assert (done.status, done.output_text) == ("completed", "Hello")
    engine.play = lambda request, index: (Started(7, 0), Failed(GenerationError("The row broke.")))
    failing = client.responses.create(**ASK, background=True)
    eventually(lambda: client.responses.retrieve(failing.id).status == "failed")
    error = client.responses.retrieve(failing.id).error
    assert error is not None and error.message == "The row broke."


def test_what_runs_in_the_background_can_be_cancelled(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (Started(7, 0), Pause())
    running = client.responses.create(**ASK, background=True)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(**ASK, previous_response_id=running.id)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"
    assert engine.aborted == [running.id] and not engine.running
    deleted = client.responses.create(**ASK, background=True)
    client.responses.delete(deleted.id)
    assert not engine.running
    engine.play = hello
    with pytest.raises(openai.BadRequestError, match="`background`"):
        client.responses.cancel(client.responses.create(**ASK).id)
