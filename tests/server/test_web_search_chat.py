"""Web searches in chat completions: the reply holds what was found in the model's words, and no call of a search."""

from typing import Any

import httpx
import openai
import pytest

from tests.api.streams import chunks
from vllm_mlx.core.events import Counted

from .fakes import FakeEngine, usage
from .searching import calls, once
from .searx import Searx

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "What is new?"}]}


SEARCHES = True
pytestmark = pytest.mark.usefixtures("engine")


def streamed(gpt: openai.OpenAI, **fields: Any) -> tuple[Any, str | None]:
    """The message that the chunks of a stream make, and why it ended."""
    with gpt.chat.completions.stream(**CHAT, **fields) as stream:
        choice = stream.get_final_completion().choices[0]
    return choice.message, choice.finish_reason


def test_a_chat_goes_on_after_a_search_streamed_or_not(gpt: openai.OpenAI, engine: FakeEngine, web: Searx) -> None:
    whole = gpt.chat.completions.create(**CHAT, web_search_options={})
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look. It is new.", "stop")
    assert choice.message.tool_calls is None and web.queries == ["news"] and len(engine.requests) == 2
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    message, reason = streamed(gpt, web_search_options={})
    assert (message.content, message.tool_calls, reason) == (choice.message.content, None, "stop")


def test_a_search_has_the_size_and_the_place_that_the_options_say(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    place: Any = {"type": "approximate", "approximate": {"city": "Oslo", "country": "NO"}}
    gpt.chat.completions.create(**CHAT, web_search_options={"search_context_size": "low", "user_location": place})
    [tool] = engine.requests[-1].tools
    assert "The user is in: Oslo, NO." in (tool.description or "")
    for field, value in (("search_context_size", "huge"), ("user_location", {"type": "exact"}), ("mood", 1)):
        with pytest.raises(openai.BadRequestError, match=field):
            gpt.chat.completions.create(**CHAT, web_search_options={field: value})


def test_calls_of_the_client_s_own_tools_are_numbered_as_if_there_were_no_search(
    gpt: openai.OpenAI, engine: FakeEngine, web: Searx
) -> None:
    engine.play = lambda request, _: calls("web_search", "ls", "web_search", "ls")
    own: Any = {"type": "function", "function": {"name": "ls", "parameters": {}}}
    whole = gpt.chat.completions.create(**CHAT, web_search_options={}, tools=[own]).choices[0]
    message, reason = streamed(gpt, web_search_options={}, tools=[own])
    for found in (whole.message, message):
        assert [(call.id, call.function.name) for call in found.tool_calls] == [("call_2", "ls"), ("call_4", "ls")]
        assert {call.function.arguments for call in found.tool_calls} == {'{"query": "news"}'}
    assert whole.finish_reason == reason == "tool_calls" and len(web.queries) == 4


def test_counts_so_far_include_the_generation_before_a_search(http: httpx.Client, engine: FakeEngine) -> None:
    def play(request: Any, index: int) -> Any:
        script = once(request, index)
        return script[0], Counted(usage(1)), *script[1:]

    engine.play = play
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "web_search_options": {}, "stream": True, "stream_options": options}
    sent = chunks(http.post("/v1/chat/completions", json=body).content)
    counts = [each["usage"]["completion_tokens"] for each in sent]
    assert counts == sorted(counts) and counts[-1] == counts[-2] and counts[-3] == 10 + 1
    assert all(request.counts for request in engine.requests)


def test_a_tool_of_the_client_s_own_that_has_this_name_is_its_own(
    gpt: openai.OpenAI, engine: FakeEngine, web: Searx
) -> None:
    engine.play = lambda request, _: calls("web_search")
    own: Any = {"type": "function", "function": {"name": "web_search", "parameters": {}}}
    [call] = gpt.chat.completions.create(**CHAT, tools=[own]).choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "web_search" and not web.queries


def test_a_choice_may_force_a_search_or_forbid_it(gpt: openai.OpenAI, engine: FakeEngine, web: Searx) -> None:
    named: Any = {"type": "function", "function": {"name": "web_search"}}
    for choice in ("required", named, "none"):
        gpt.chat.completions.create(**CHAT, web_search_options={}, tool_choice=choice)
    modes = [request.tool_choice.mode for request in engine.requests]
    assert modes == ["required", "auto", "required", "auto", "none", "auto"]


def test_several_replies_to_one_request_run_no_searches(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="leave `n` out"):
        gpt.chat.completions.create(**CHAT, web_search_options={}, n=2)
    with pytest.raises(openai.BadRequestError, match="Searches run in chat completions"):
        gpt.completions.create(model="tiny", prompt="x", extra_body={"web_search_options": {}})


def test_a_body_in_the_form_of_responses_has_its_search_too(http: httpx.Client, web: Searx) -> None:
    body = {"input": "What is new?", "tools": [{"type": "web_search", "filters": {"allowed_domains": ["example.com"]}}]}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == "Let me look. It is new." and web.queries == ["news site:example.com"]
    assert choice["finish_reason"] == "stop"
