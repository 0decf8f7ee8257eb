"""A request's `prediction`: which forms it may have, that it changes no reply, and what the usage says of it."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.running import Running

from .watched import engine_served

ASKED: Any = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 40,
}


@contextmanager
def served(**settings: Any) -> Iterator[Running]:
    with engine_served(checkpoint("qwen3"), max_model_len=512, **settings) as running:
        yield running
        assert not asyncio.run(running.engine.ask(lambda engine: engine.report().lanes[0].num_restarts))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served(num_draft_tokens=7) as running:
        yield running


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def predicted(content: Any) -> Any:
    return {"type": "content", "content": content}


def counts(usage: Any) -> tuple[int | None, int | None]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_right_prediction_is_accepted_and_changes_no_reply(gpt: openai.OpenAI) -> None:
    plain = gpt.chat.completions.create(**ASKED)
    text = plain.choices[0].message.content or ""
    assert counts(plain.usage) == (None, None)
    middle = len(text) // 2
    parts = [{"type": "text", "text": text[:middle]}, {"type": "text", "text": text[middle:]}]
    for content in (text, parts):
        reply = gpt.chat.completions.create(**ASKED, prediction=predicted(content))
        assert reply.choices == plain.choices
        accepted, rejected = counts(reply.usage)
        assert reply.usage is not None and accepted is not None and rejected is not None
        assert reply.usage.completion_tokens // 4 < accepted <= reply.usage.completion_tokens


def test_the_last_chunk_of_a_stream_counts_too(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(**ASKED)
    prediction = predicted(whole.choices[0].message.content)
    *_, last = gpt.chat.completions.create(
        **ASKED, prediction=prediction, stream=True, stream_options={"include_usage": True}
    )
    accepted, _ = counts(last.usage)
    assert accepted


def test_a_wrong_prediction_is_rejected_and_changes_no_reply(gpt: openai.OpenAI) -> None:
    plain = gpt.chat.completions.create(**ASKED)
    reply = gpt.chat.completions.create(**ASKED, prediction=predicted("import os\n\nprint(os.getcwd())\n"))
    assert reply.choices == plain.choices
    accepted, rejected = counts(reply.usage)
    assert accepted == 0 and rejected


def test_all_replies_to_a_request_are_counted(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(**ASKED)
    prediction = predicted(whole.choices[0].message.content)
    one = gpt.chat.completions.create(**ASKED, prediction=prediction)
    two = gpt.chat.completions.create(**ASKED, prediction=prediction, n=2)
    assert [choice.message.content for choice in two.choices] == [whole.choices[0].message.content] * 2
    assert (counts(two.usage)[0] or 0) > (counts(one.usage)[0] or 0) > 0


def test_status_and_metrics_say_what_drafts_were_worth(server: Running, gpt: openai.OpenAI) -> None:
    before = httpx.get(f"{server.url}/v1/status", timeout=60).json()["drafts"]
    whole = gpt.chat.completions.create(**ASKED)
    reply = gpt.chat.completions.create(**ASKED, prediction=predicted(whole.choices[0].message.content))
    drafts = httpx.get(f"{server.url}/v1/status", timeout=60).json()["drafts"]
    assert (drafts["enabled"], drafts["off_reason"], drafts["parked"]) == (True, None, None)
    accepted, drafted = drafts["accepted_tokens"], drafts["drafted_tokens"]
    assert accepted["prediction"] - before["accepted_tokens"]["prediction"] == counts(reply.usage)[0]
    assert drafts["num_drafts"] >= drafts["num_passes"] > before["num_passes"]
    assert drafts["tokens_per_pass"] == round(1 + sum(accepted.values()) / drafts["num_drafts"], 2) > 1
    by_position = drafts["accepted_by_position"]
    assert sum(by_position) == sum(accepted.values()) and by_position == sorted(by_position, reverse=True)
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    for name, number in (
        ("drafts", drafts["num_drafts"]),
        ("draft_tokens", sum(drafted.values())),
        ("accepted_tokens", sum(accepted.values())),
    ):
        assert re.search(rf"^vllm:spec_decode_num_{name}_total{{[^}}]*}} {number:.1f}$", metrics, re.MULTILINE)
    first = rf'^vllm:spec_decode_num_accepted_tokens_per_pos_total{{.*position="0"}} {by_position[0]:.1f}$'
    assert re.search(first, metrics, re.MULTILINE)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_draft_tokens": 0}, id="0"),
        pytest.param({"repeatable": True}, id="repeatable", marks=pytest.mark.full),
    ],
)
def test_without_drafts_a_prediction_counts_zero(settings: dict[str, Any]) -> None:
    with served(**settings) as server, client_of(server) as gpt:
        reply = gpt.chat.completions.create(**ASKED, prediction=predicted("Once upon a time"))
        drafts = httpx.get(f"{server.url}/v1/status", timeout=60).json()["drafts"]
        assert "spec_decode" not in httpx.get(f"{server.url}/metrics", timeout=60).text
    assert counts(reply.usage) == (0, 0)
    [name] = settings
    assert not drafts["enabled"] and drafts["off_reason"].startswith(f"--{name.replace('_', '-')} is ")
    assert drafts["num_drafts"] == drafts["num_passes"] == 0


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("a text", "prediction"),
        ({"type": "file", "content": "a"}, "prediction.type"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "a"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "a", "mode": "b"}, "prediction.mode"),
        ({"type": "content", "content": "word " * 500_000}, "prediction"),
    ],
)
def test_other_forms_are_refused_by_name(server: Running, prediction: Any, param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASKED, "prediction": prediction}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and "prompt" not in answer.text


def test_completions_ignore_it(gpt: openai.OpenAI) -> None:
    extra = {"prediction": predicted("a")}
    reply = gpt.completions.create(model="tiny", prompt="Once", max_tokens=5, extra_body=extra)
    assert reply.usage is not None and counts(reply.usage) == (None, None)
