"""Web searches in Responses: their items, and the conversation that comes back with them."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.support.running import Running
from vllm_mlx.core.messages import TextPart, ToolCallPart, ToolResultPart

from .fakes import FakeEngine, Script, says
from .searching import TEXT, as_codex_sends, calls, results
from .searx import Searx

SEARCHES = True
pytestmark = pytest.mark.usefixtures("engine")


def test_a_response_holds_the_search_streamed_or_not(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    ask: Any = {"model": "tiny", "tools": [{"type": "web_search"}], "store": False}
    include: Any = ["web_search_call.action.sources"]
    whole = gpt.responses.create(**ask, input="What is new?", include=include)
    kinds = ["reasoning", "message", "web_search_call", "reasoning", "message"]
    assert [item.type for item in whole.output] == kinds
    call: Any = whole.output[2]
    assert call.status == "completed" and call.action.query == "news" and len(call.action.sources) == 2
    events = list(gpt.responses.create(**ask, input="What is new?", include=include, stream=True))
    last: Any = events[-1]
    assert [item.model_dump(exclude={"id"}) for item in last.response.output] == [
        item.model_dump(exclude={"id"}) for item in whole.output
    ]
    names = [event.type for event in events if "web_search_call" in event.type]
    assert names == [f"response.web_search_call.{step}" for step in ("in_progress", "searching", "completed")]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2, 3, 4]


def as_sent(item: Any) -> Any:
    """The item with all its fields, as OpenAI's package sends it back."""
    return item.model_dump(exclude_none=True)


def by_codex(item: Any) -> Any:
    return as_codex_sends(as_sent(item))


SCRIPTS: dict[str, tuple[Script, ...]] = {  # what the model writes in its generations
    "once": (calls("web_search"), says("It is ", "new.")),
    "twice": (calls("web_search", before=""), calls("web_search", query="more", first=2, before=""), says("It is.")),
    "the same twice": (calls("web_search", before=""), calls("web_search", first=2, before=""), says("It is.")),
    "two at once": (calls("web_search", "web_search"), says("It is.")),
    "no query": (calls("web_search", query='"}{'), says("It is.")),
}


@pytest.mark.parametrize("send", [as_sent, by_codex])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_response_with_searches_comes_back_as_the_same_conversation(
    gpt: openai.OpenAI, engine: FakeEngine, name: str, send: Callable[[Any], Any]
) -> None:
    scripts = SCRIPTS[name]
    engine.play = lambda request, _: scripts[len(engine.requests) - 1]
    ask: Any = {"model": "tiny", "tools": [{"type": "web_search"}], "store": False}
    whole = gpt.responses.create(**ask, input="What is new?")
    assert len(engine.requests) == len(scripts)
    known = engine.requests[-1].messages
    engine.play = lambda request, _: says("Yes.")
    sent: Any = [{"role": "user", "content": "What is new?"}, *map(send, whole.output)]
    gpt.responses.create(**ask, input=[*sent, {"role": "user", "content": "And?"}])
    messages = engine.requests[-1].messages
    assert known is not None and messages is not None and messages[: len(known)] == known
    said, asked = messages[len(known) :]
    assert (said.parts, asked.role) == ((TextPart("".join(part.text for part in said.parts)),), "user")


@pytest.mark.parametrize("send", [as_sent, by_codex])
def test_searches_beside_a_call_of_the_client_come_back_in_their_places(
    gpt: openai.OpenAI, engine: FakeEngine, send: Callable[[Any], Any]
) -> None:
    engine.play = lambda request, _: calls("web_search", "ls", "web_search")
    own = {"type": "function", "name": "ls"}
    ask: Any = {"model": "tiny", "tools": [{"type": "web_search"}, own], "store": False}
    whole = gpt.responses.create(**ask, input="What is new?")
    *_, end = gpt.responses.create(**ask, input="What is new?", stream=True)
    assert [as_sent(item) | {"id": ""} for item in end.response.output] == [
        as_sent(item) | {"id": ""} for item in whole.output
    ]
    sent: Any = [{"role": "user", "content": "What is new?"}, *map(send, whole.output)]
    done = {"type": "function_call_output", "call_id": "call_2", "output": "a"}
    gpt.responses.create(**ask, input=[*sent, done])
    parts = [part for message in engine.requests[-1].messages or () for part in message.parts]
    found = [(type(part), part.call_id) for part in parts if isinstance(part, ToolCallPart | ToolResultPart)]
    assert found == [
        *((ToolCallPart, f"call_{number}") for number in (1, 2, 3)),
        *((ToolResultPart, f"call_{number}") for number in (1, 3, 2)),
    ]


def test_an_item_of_a_search_without_its_reasoning_is_left_out(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    search: Any = {"type": "web_search_call", "action": {"type": "search", "query": "news"}, "status": "completed"}
    other: Any = {"type": "web_search_call", "action": {"type": "open_page", "url": "x"}, "status": "completed"}
    hi: Any = {"role": "user", "content": "hi"}
    gpt.responses.create(model="tiny", input=[hi, search, other, hi])
    assert [message.role for message in engine.requests[-1].messages or ()] == ["user", "user"]


def test_responses_limit_and_narrow_searches(gpt: openai.OpenAI, engine: FakeEngine, web: Searx) -> None:
    tool: Any = {"type": "web_search", "filters": {"allowed_domains": ["example.org"]}, "search_context_size": "low"}
    gpt.responses.create(model="tiny", input="x", tools=[tool], tool_choice={"type": "web_search"})  # type: ignore[call-overload]
    assert web.queries == ["news site:example.org"] and engine.requests[0].tool_choice.name == "web_search"
    engine.play = lambda request, _: calls("web_search", first=1 + len(results(request)), before="")
    response = gpt.responses.create(model="tiny", input="x", tools=[{"type": "web_search"}], max_tool_calls=1)
    statuses = [item.status for item in response.output if item.type == "web_search_call"]
    assert statuses[:2] == ["completed", "failed"] and len(statuses) <= 4


def test_a_stored_response_goes_on_with_its_search(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    first = gpt.responses.create(model="tiny", input="What is new?", tools=[{"type": "web_search"}])
    gpt.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    assert results(engine.requests[-1])[0].content == (TextPart(TEXT),)


NOT_LIVE: Any = {"type": "web_search", "external_web_access": False}
LS: Any = {"type": "function", "name": "ls", "parameters": {}}


def test_a_search_that_is_not_live_is_refused_if_the_request_is_about_it(gpt: openai.OpenAI) -> None:
    """The server has a web search, so the error does not send its operator after one."""
    for fields in ({"tools": [NOT_LIVE]}, {"tools": [NOT_LIVE, LS], "tool_choice": {"type": "web_search"}}):
        with pytest.raises(openai.BadRequestError, match="`external_web_access` false") as refused:
            gpt.responses.create(**{"model": "tiny", "input": "x", **fields})
        assert "--web-search" not in str(refused.value) and 'web_search="live"' in str(refused.value)


def test_tools_that_the_model_does_not_see_are_named_in_the_answer_and_in_the_log(
    server: Running, http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    inner = {"type": "namespace", "name": "n", "tools": [LS, {"type": "custom", "name": "c"}]}
    tools = [NOT_LIVE, {"type": "image_generation"}, inner]
    names = ("tools[].web_search.external_web_access", "tools[].image_generation", "tools[].tools[].custom")
    for path in ("responses", "chat/completions"):
        answer = http.post(f"/v1/{path}", json={"input": "x", "tools": tools})
        assert answer.status_code == 200 and answer.headers["x-unknown-fields"] == ", ".join(names)
    search = {"type": "web_search_20250305", "name": "web_search"}
    fetch = {"type": "web_fetch_20250910", "name": "web_fetch"}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": [search, fetch]}
    answer = http.post("/v1/messages", json=body)
    assert answer.headers["x-unknown-fields"] == "tools[].web_fetch_20250910"
    assert [tool.name for request in engine.requests[:2] for tool in request.tools] == ["n__ls", "n__ls"]
    for name in names:
        assert f"{name} to /v1/responses, which this server does not know or cannot run" in caplog.text
