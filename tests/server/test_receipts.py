"""What each reply says of the cache: in its usage, a header, the log and the status, in every protocol."""

import logging
from typing import Any

import httpx
import pytest

from tests.support.protocols import PROTOCOLS, SEEING, Protocol
from tests.support.rows import cases
from tests.support.running import Running, eventually
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.receipt import CacheReceipt, ChangeCause, Expectation, PromptChange, Shortfall
from vllm_mlx.formats.tokenizer import Tokenizer

CHANGE = PromptChange(
    cause=ChangeCause.MESSAGE, num_common_tokens=40, num_previous_tokens=90, previous_token_id=1, token_id=2
)


@pytest.mark.parametrize(
    ("cached", "stored", "expected", "change", "shortfall"),
    [
        (80, 80, 80, None, None),
        (99, 99, 0, None, None),
        (0, 0, 0, None, None),
        (0, 0, 80, None, Shortfall.NOT_STORED),
        (50, 60, 80, None, Shortfall.NOT_STORED),
        (64, 80, 80, None, Shortfall.NO_RESUME_POINT),
        (40, 40, 80, CHANGE, Shortfall.ALTERED),
        (32, 40, 80, CHANGE, Shortfall.ALTERED),
        (10, 10, 80, CHANGE, Shortfall.NOT_STORED),
        (99, 100, 200, None, None),
    ],
)
def test_why_less_was_cached_than_expected(cached, stored, expected, change, shortfall) -> None:
    expectation = Expectation(num_tokens=expected, change=change)
    receipt = CacheReceipt(prompt_tokens=100, cached_tokens=cached, stored_tokens=stored, expectation=expectation)
    assert receipt.shortfall is shortfall
    assert (receipt.why is None) == (shortfall is None)


MODEL, SETTINGS = "demo", {"text_only": True}
FIRST = "Say: hello"


def ask(http: httpx.Client, protocol: Protocol, conversation: list):
    answer = http.post(protocol.path, json=protocol.body(*conversation, max_tokens=200, temperature=0))
    assert answer.status_code == 200, answer.text
    return answer, protocol.text(answer.json())


@pytest.mark.parametrize("name", cases(SEEING, ["chat", "messages"]))
def test_each_reply_tells_what_was_reused_and_why_not_more(http: httpx.Client, name: str, caplog) -> None:
    caplog.set_level(logging.INFO, "vllm_mlx.requests")
    protocol = PROTOCOLS[name]
    start = [{"role": "system", "content": "You count."}, {"role": "user", "content": f"{FIRST} {name}"}]
    if name == "messages":  # this protocol's conversations begin with the user
        start = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1"}, start[1]]
    first, said = ask(http, protocol, start)
    assert "cache_shortfall" not in first.json()["usage"] and "expected=0" in first.headers["x-cache-receipt"]
    second = [*start, {"role": "assistant", "content": said}, {"role": "user", "content": "What is 2 + 3?"}]
    good, _ = ask(http, protocol, second)
    assert "cache_shortfall" not in good.json()["usage"] and "reason" not in good.headers["x-cache-receipt"]
    assert "expected=0" not in good.headers["x-cache-receipt"]

    at = len(start) - 1
    altered = [*start[:at], {"role": "user", "content": "Count to 5."}, *second[at + 1 :]]
    answer, _ = ask(http, protocol, altered)
    shortfall = answer.json()["usage"]["cache_shortfall"]
    assert shortfall["reason"] == "altered" and f"message {at} (user)" in shortfall["detail"]
    assert "reason=altered" in answer.headers["x-cache-receipt"]
    status = http.get("/v1/status").json()
    assert "cache_shortfalls_total" in http.get("/metrics").text
    last = status["last_replies"][0]
    assert last["why"] == shortfall["detail"] and last["expected_tokens"] == shortfall["expected_tokens"]
    assert status["cache"]["shortfalls"]["altered"] >= 1
    eventually(lambda: "altered=" in caplog.text)
    assert FIRST not in caplog.text

    http.delete("/v1/cache")
    cleared, _ = ask(http, protocol, second)
    assert cleared.json()["usage"]["cache_shortfall"]["reason"] == "not_stored"
    eventually(lambda: "not_cached=" in caplog.text)


def test_a_stream_has_the_header_too(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": FIRST}], "stream": True, "stream_options": {"include_usage": True}}
    with server.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        *_, last = events_of(reply.iter_lines())
    usage = last["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert f"prompt={usage['prompt_tokens']}; cached={cached};" in reply.headers["x-cache-receipt"]


def test_several_prompts_have_one_receipt_their_sum(http: httpx.Client) -> None:
    body = {"prompt": [f"{word} and so on and so forth" for word in ("One", "Two", "Three")], "max_tokens": 4, "n": 2}
    for is_warm in (False, True):
        reply = http.post("/v1/completions", json=body)
        usage = reply.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == is_warm
        tier = "; tier=memory" if is_warm else ""
        said = f"prompt={usage['prompt_tokens']}; cached={cached}; expected=0{tier}; prompts=3"
        assert reply.headers["x-cache-receipt"] == said
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
        texts = [event["choices"][0] for event in events_of(streamed.iter_lines())]
    assert streamed.headers["x-cache-receipt"] == said
    assert {choice["index"] for choice in texts if choice["finish_reason"]} == set(range(6))


def test_counting_renders_a_conversation_once(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Count me."}]}
    renderings, render = [], Tokenizer.apply_chat_template

    def rendered(*args: Any, **kwargs: Any) -> str:
        renderings.append(kwargs)
        return render(*args, **kwargs)

    http.post("/v1/messages/count_tokens", json=body)  # what the template takes is known from now on
    monkeypatch.setattr(Tokenizer, "apply_chat_template", rendered)
    answer = http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert len(renderings) == 1
