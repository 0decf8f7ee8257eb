"""Web searches that the server runs for the model: in every protocol, within limits, and the same in the next turn."""

import threading
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.running import Running, eventually, serving
from vllm_mlx.core.errors import ContextLengthExceeded
from vllm_mlx.core.events import (
    Finished,
    FinishReason,
    Started,
    TextDelta,
    Usage,
)
from vllm_mlx.core.messages import Message, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request

from .fakes import FakeEngine, Script
from .searching import TEXT, as_codex_sends, calls, results
from .searx import PAGES, Searx
from .watched import engine_served

ASK: Any = [{"role": "user", "content": "What is new?"}]
TOOL: Any = {"type": "web_search_20250305", "name": "web_search"}
MESSAGE: Any = {"model": "tiny", "max_tokens": 100, "messages": ASK}


SEARCHES = True
pytestmark = pytest.mark.usefixtures("engine")


def asked(claude: anthropic.Anthropic, tools: Any = (TOOL,), **fields: Any) -> Any:
    return claude.messages.create(**MESSAGE, tools=list(tools), **fields)


def test_a_message_holds_the_search_and_what_was_found(
    claude: anthropic.Anthropic, engine: FakeEngine, web: Searx
) -> None:
    whole = asked(claude)
    assert [block.type for block in whole.content] == ["text", "server_tool_use", "web_search_tool_result", "text"]
    _, call, found, text = whole.content
    assert (call.id, call.name, call.input) == ("srvtoolu_1", "web_search", {"query": "news"})
    assert found.tool_use_id == call.id and [page.url for page in found.content] == [PAGES[0]["url"], PAGES[2]["url"]]
    assert text.text == "It is new." and whole.stop_reason == "end_turn" and web.queries == ["news"]
    assert whole.usage.server_tool_use.web_search_requests == 1 and whole.usage.output_tokens == 12
    with claude.messages.stream(**MESSAGE, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_the_usage_is_the_sum_of_all_generations(
    claude: anthropic.Anthropic, gpt: openai.OpenAI, engine: FakeEngine
) -> None:
    last = Usage(prompt_tokens=30, cached_tokens=25, completion_tokens=4, reasoning_tokens=1)

    def play(request: Request, index: int) -> Script:
        if len(found := results(request)) < 2:
            return calls("web_search", first=1 + len(found))
        return Started(30, 25), TextDelta("It is new."), Finished(FinishReason.STOP, last)

    engine.play = play
    with claude.messages.stream(**MESSAGE, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    for usage in (streamed.usage, asked(claude).usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (15, 29, 24)
        assert usage.output_tokens_details.thinking_tokens == 1
    ask: Any = {"model": "tiny", "tools": [{"type": "web_search"}], "store": False, "input": "x"}
    *_, end = gpt.responses.create(**ask, stream=True)
    for response in (end.response, gpt.responses.create(**ask)):
        usage = response.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (44, 29)
        assert (usage.output_tokens, usage.total_tokens) == (24, 68)


def test_the_next_generation_and_the_next_turn_have_the_same_conversation(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    thinking: Any = {"type": "adaptive"}
    reply = asked(claude, thinking=thinking)
    _, second = engine.requests
    assert second.messages is not None
    _, said, result = second.messages
    assert isinstance(said.parts[-1], ToolCallPart) and len(said.parts) == 3
    assert result.parts == (ToolResultPart("call_1", (TextPart(TEXT),), "web_search"),)
    content = [block.model_dump(exclude_none=True) for block in reply.content]
    more: Any = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
    claude.messages.create(**{**MESSAGE, "messages": more}, tools=[TOOL], thinking=thinking)
    third = engine.requests[-1]
    assert third.messages is not None and third.messages[:3] == second.messages
    assert third.messages[3:] == (
        Message("assistant", (TextPart("It is new."),)),
        Message("user", (TextPart("And?"),)),
    )
    assert third.tools == second.tools


def test_a_search_is_within_what_the_request_allows(
    claude: anthropic.Anthropic, engine: FakeEngine, web: Searx
) -> None:
    found = asked(claude, [{**TOOL, "allowed_domains": ["example.com"]}]).content[2]
    assert [page.url for page in found.content] == [PAGES[2]["url"]] and web.queries == ["news site:example.com"]
    found = asked(claude, [{**TOOL, "blocked_domains": ["example.com"]}]).content[2]
    assert [page.url for page in found.content] == [PAGES[0]["url"]]
    place = {"type": "approximate", "city": "Oslo", "country": "NO"}
    asked(claude, [{**TOOL, "user_location": place}])
    assert "The user is in: Oslo, NO." in (engine.requests[-1].tools[0].description or "")
    many = ["example.com", *(f"some-long-domain-{number}.example.org" for number in range(60))]
    found = asked(claude, [{**TOOL, "allowed_domains": many}]).content[2]
    assert [page.url for page in found.content] == [PAGES[2]["url"]] and web.queries[-1] == "news"
    both, url, wild = (
        {"allowed_domains": ["a.b"], "blocked_domains": ["c.d"]},
        {"allowed_domains": ["http://a.b"]},
        {"blocked_domains": ["*.a.b"]},
    )
    for fields in (both, url, wild):
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]"):
            asked(claude, [{**TOOL, **fields}])


def test_no_other_tool_has_the_name_of_the_search(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"`tools\[0\]` and `tools\[1\].name` are two tools"):
        asked(claude, [TOOL, {"name": "web_search", "input_schema": {"type": "object"}}])
    own: Any = {"type": "function", "name": "web_search", "parameters": {}, "strict": False}
    with pytest.raises(openai.BadRequestError, match=r"`tools\[0\].name` and `tools\[1\]` are two tools"):
        gpt.responses.create(model="tiny", input="x", tools=[own, {"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match=r"`tools\[0\]` and `tools\[1\]` are two tools"):
        gpt.responses.create(model="tiny", input="x", tools=[{"type": "web_search"}, {"type": "web_search_preview"}])
    chat: Any = {"model": "tiny", "messages": ASK, "tools": [{"type": "function", "function": {"name": "web_search"}}]}
    with pytest.raises(openai.BadRequestError, match=r"`tools\[0\].function.name` and `web_search_options` are two"):
        gpt.chat.completions.create(**chat, web_search_options={})


def test_the_search_of_messages_has_one_name(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"`tools\[0\].name` must be 'web_search'"):
        asked(claude, [{**TOOL, "name": "search"}])
    asked(claude, [{"type": TOOL["type"]}])
    assert [tool.name for tool in engine.requests[-1].tools] == ["web_search"]


def test_a_client_that_leaves_ends_the_search(server: Running, engine: FakeEngine, web: Searx) -> None:
    come, go = threading.Event(), threading.Event()

    def slow(query: str) -> tuple[int, bytes]:
        come.set()
        go.wait(60)
        return 200, b"{}"

    web.answer = slow
    with server.http() as http, http.stream("POST", "/v1/messages", json={**MESSAGE, "tools": [TOOL], "stream": True}):
        assert come.wait(60)
    with server.http() as http:
        eventually(lambda: not engine.running)
        assert http.get("/health").status_code == 200
    go.set()
    assert len(engine.requests) == 1


def test_searches_end(claude: anthropic.Anthropic, engine: FakeEngine, web: Searx) -> None:
    engine.play = lambda request, _: calls("web_search", first=1 + len(results(request)), before="")
    reply = asked(claude, [{**TOOL, "max_uses": 2}])
    codes = [getattr(block.content, "error_code", "found") for block in reply.content if "result" in block.type]
    assert codes[:3] == ["found", "found", "max_uses_exceeded"] and len(codes) <= 5 and len(web.queries) == 2
    assert reply.stop_reason == "end_turn" and reply.usage.server_tool_use.web_search_requests == 2


def test_the_limit_of_a_reply_counts_all_its_generations(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    asked(claude)
    assert [request.sampling.max_tokens for request in engine.requests] == [100, 90]
    reply = claude.messages.create(**{**MESSAGE, "max_tokens": 10}, tools=[TOOL])
    assert reply.stop_reason == "max_tokens" and reply.content[-1].type == "web_search_tool_result"


def test_a_context_that_is_full_ends_the_reply(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    def play(request: Request, index: int) -> Script:
        engine.refuse = ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512)
        return calls("web_search")

    engine.play = play
    assert asked(claude).stop_reason == "model_context_window_exceeded"
    engine.refuse = None


def test_calls_of_the_client_s_own_tools_end_the_reply(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.play = lambda request, _: calls("web_search", "ls")
    reply = asked(claude, [TOOL, {"name": "ls", "input_schema": {"type": "object"}}])
    kinds = ["text", "server_tool_use", "tool_use", "web_search_tool_result"]
    assert [block.type for block in reply.content] == kinds and reply.stop_reason == "tool_use"
    assert len(engine.requests) == 1


def test_a_choice_that_forces_a_search_forces_one(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    asked(claude, tool_choice={"type": "tool", "name": "web_search"})
    assert [(request.tool_choice.mode, request.tool_choice.name) for request in engine.requests] == [
        ("required", "web_search"),
        ("auto", None),
    ]


FAULTS: dict[str, tuple[int, bytes]] = {
    "unavailable": (500, b""),
    "too_many_requests": (429, b""),
    "unavailable: no JSON": (200, b"<html>"),
    "unavailable: a redirect": (302, b""),
    "unavailable: no results": (200, b'{"error": "format not allowed"}'),
    "unavailable: no object": (200, b"null"),
    "unavailable: too long": (200, b'{"results": "' + b"x" * 3_000_000),
    "unavailable: too deep": (200, b'{"results":' + b"[" * 100_000),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_search_that_fails_is_told(
    claude: anthropic.Anthropic, engine: FakeEngine, web: Searx, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    web.answer = lambda query: FAULTS[name]
    reply = asked(claude)
    assert f"The search server {web.url} " in caplog.text
    code = name.partition(":")[0]
    assert reply.content[2].content.error_code == code and reply.content[3].text == "It is new."
    assert results(engine.requests[-1])[0] == ToolResultPart(
        "call_1", (TextPart(f"The search failed: {code}."),), "web_search", True
    )


def test_without_a_search_server_a_request_for_one_names_the_setting() -> None:
    other = {"name": "ls", "input_schema": {"type": "object"}}
    forced = {"tools": [TOOL, other], "tool_choice": {"type": "tool", "name": "web_search"}}
    responses = ({"tools": [{"type": "web_search"}]}, {"tool_choice": {"type": "web_search"}})
    with serving(FakeEngine()) as running, running.http() as http:
        for body in ({"tools": [TOOL]}, forced):
            answer = http.post("/v1/messages", json={**MESSAGE, **body})
            assert answer.status_code == 400 and "--web-search" in answer.json()["error"]["message"]
        for body in responses:
            answer = http.post("/v1/responses", json={"input": "x", **body})
            assert answer.status_code == 400 and "--web-search" in answer.json()["error"]["message"]
        for body in ({"messages": ASK, "web_search_options": {}}, {"input": "x", "tools": [{"type": "web_search"}]}):
            error = http.post("/v1/chat/completions", json=body).json()["error"]
            assert "start the server with --web-search" in error["message"]
            assert error["param"] in ("web_search_options", "tools")
        assert http.post("/v1/messages", json={**MESSAGE, "tools": [TOOL, other]}).status_code == 200
        assert [tool.name for tool in running.engine.requests[-1].tools] == ["ls"]


def hit_tokens(http: httpx.Client) -> int:
    [line] = [
        line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")
    ]
    return int(float(line.split()[-1]))


def test_the_second_generation_and_the_next_turn_begin_in_the_prefix_cache(web: Searx) -> None:
    settings: Any = {"text_only": True, "enable_thinking": False}
    with engine_served("demo", options={"web_search": web.url}, **settings) as running, running.http() as http:
        ask = [{"role": "user", "content": "Search the web for news."}]
        body = {**MESSAGE, "messages": ask, "max_tokens": 400, "tools": [TOOL], "temperature": 0}
        forced = {"tool_choice": {"type": "tool", "name": "web_search"}}
        first = http.post("/v1/messages", json={**body, **forced}).json()
        assert [block["type"] for block in first["content"]] == ["server_tool_use", "web_search_tool_result", "text"]
        asked_tokens = http.post("/v1/messages/count_tokens", json={"messages": ask, "tools": [TOOL]}).json()
        assert hit_tokens(http) >= asked_tokens["input_tokens"] - 16 > 100
        turns = [*ask, {"role": "assistant", "content": first["content"]}]  # which the template shows unchanged
        second = http.post("/v1/messages", json={**body, "messages": turns}).json()["usage"]
        whole = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert second["cache_read_input_tokens"] >= whole - 32
        ask_gpt = {"max_output_tokens": 400, "tools": [{"type": "web_search"}], "temperature": 0, "store": False}
        forced = {"input": ask, "tool_choice": {"type": "web_search"}}
        third = http.post("/v1/responses", json={**ask_gpt, **forced}).json()
        items = [ask[0], *(as_codex_sends(item) for item in third["output"])]
        fourth = http.post("/v1/responses", json={**ask_gpt, "input": items}).json()["usage"]
        assert fourth["input_tokens_details"]["cached_tokens"] >= fourth["input_tokens"] - 32 > whole - 64
