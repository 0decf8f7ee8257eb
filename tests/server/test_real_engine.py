"""The whole server over a tiny random checkpoint: from the socket to the tokens and back."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.rows import cases, row
from tests.support.running import Running
from vllm_mlx.api.openai.replies import CompletionLogprobs
from vllm_mlx.formats import logprobs, pipeline

from .watched import engine_served

HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


MODEL, SETTINGS = "qwen3", {"max_model_len": 256}
CONTINUOUS: Any = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(("path", "num_prompts"), [("chat/completions", 1), ("completions", 2)])
def test_every_chunk_says_what_its_choice_has_used(http: httpx.Client, path: str, num_prompts: int) -> None:
    asked = {"messages": HI} if "chat" in path else {"prompt": ["Once", "Once upon a time"]}
    body = {**asked, "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": CONTINUOUS}
    lines = http.post(f"/v1/{path}", json=body).text.split("\n\n")
    plain = http.post(f"/v1/{path}", json=body | {"stream_options": {"continuous_usage_stats": True}}).text
    *chunks, total = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    usages: dict[int, list[Any]] = {index: [] for index in range(2 * num_prompts)}
    for chunk in chunks:
        usages[chunk["choices"][0]["index"]].append(chunk["usage"])
    for of_choice in usages.values():
        counts = [usage["completion_tokens"] for usage in of_choice]
        assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 3
        assert counts[0] == 0 or "chat" not in path, "the chunk of the role comes before the first token"
        assert len({usage["prompt_tokens"] for usage in of_choice}) == 1
        assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in of_choice)
    assert total["choices"] == [] and total["usage"]["completion_tokens"] == 12 * num_prompts
    assert total["usage"]["prompt_tokens"] == sum(usages[2 * at][0]["prompt_tokens"] for at in range(num_prompts))
    assert '"usage"' not in plain, "only with `include_usage`, as in vLLM"


def test_completions_echo_and_logprobs(gpt: openai.OpenAI) -> None:
    plain = gpt.completions.create(prompt="Once", **GREEDY).choices[0]
    echoed = gpt.completions.create(prompt="Once", echo=True, **GREEDY).choices[0]
    assert echoed.text == f"Once{plain.text}"
    logprobs = gpt.completions.create(prompt="Once", logprobs=2, **GREEDY).choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == plain.text
    assert all(0 < len(top) <= 2 for top in logprobs.top_logprobs)


TOKENS: Any = {**GREEDY, "echo": True, "logprobs": 2}


@pytest.mark.parametrize("prompt", ["Once upon a 東京 🙂 time", "<|im_end|> x", [[5, 6, 7], [9]], [300] * 40], ids=str)
@pytest.mark.parametrize("num", [0, 3])
def test_an_echo_with_logprobs_has_every_token_of_the_prompt(gpt: openai.OpenAI, prompt: Any, num: int) -> None:
    asked = {**TOKENS, "prompt": prompt, "n": 2, "max_tokens": num}
    whole = gpt.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == num * len(whole.choices)
    texts: dict[int, str] = defaultdict(str)
    found: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for chunk in gpt.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                found[choice.index][name] += values
    for choice in whole.choices:
        logprobs: Any = choice.logprobs
        assert choice.text == texts[choice.index]
        check_equal(logprobs, CompletionLogprobs(**found[choice.index]))
        assert choice.finish_reason == "length"
        check_logprobs(choice.text, logprobs)
    check_equal(whole.choices[0].logprobs, whole.choices[1].logprobs)
    num_tokens = [len(choice.logprobs.tokens) for choice in whole.choices if choice.logprobs]
    assert sum(num_tokens) == 2 * whole.usage.prompt_tokens + whole.usage.completion_tokens


def check_equal(logprobs: Any, others: Any) -> None:
    """The tokens are the same. Values are nearly so: rows that decode beside other rows round differently."""
    assert (logprobs.tokens, logprobs.text_offset) == (others.tokens, others.text_offset)
    for name in ("token_logprobs", "top_logprobs"):
        pairs = zip(getattr(logprobs, name)[1:], getattr(others, name)[1:], strict=True)
        assert all(one == pytest.approx(other, abs=1e-4) for one, other in pairs)


def check_logprobs(text: str, logprobs: Any) -> None:
    first, *rest = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    assert first[1:] == (None, None)
    assert all(own <= 0 and 2 <= len(top) <= 3 and top[token] == own for token, own, top in rest)
    ends = [*logprobs.text_offset[1:], len(text)]
    for token, start, end in zip(logprobs.tokens, logprobs.text_offset, ends, strict=True):
        assert "\ufffd" in token or text[start:end] == token


@pytest.mark.parametrize("stream", cases([False, True], [True]))
def test_many_log_probabilities_are_written_beside_the_event_loop(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """While they are written, another client is replied to."""
    places, write, health = logprobs.echo_logprobs, CompletionLogprobs.of, list[int]()

    def ask() -> None:
        with running.http() as http:
            health.append(http.get("/health", timeout=20).status_code)

    def place_slowly(*args: Any) -> Any:
        ask()
        return places(*args)

    def write_slowly(*args: Any) -> Any:
        if len(args[0]) > 1000:
            ask()
        return write(*args)

    monkeypatch.setattr(pipeline, "echo_logprobs", place_slowly)
    monkeypatch.setattr(CompletionLogprobs, "of", write_slowly)
    with engine_served(checkpoint("qwen3"), max_model_len=2048) as running, running.http() as http:
        asked = {"prompt": [300] * 1500, "echo": True, "logprobs": 0, "max_tokens": 2, "stream": stream}
        text = http.post("/v1/completions", json=asked, timeout=60).text
    offsets = re.findall(r'"text_offset":\[([\d,]+)\]', text)  # a stream may have several chunks
    assert sum(len(each.split(",")) for each in offsets) == 1502
    assert health == [200, 200]


def test_an_echo_shows_the_token_that_ends_the_reply(gpt: openai.OpenAI, server: Running) -> None:
    """A client that reads all but the last token has the whole prompt."""
    eos = min(server.engine.processor.tokenizer.eos_token_ids)
    ended = gpt.completions.create(
        model="tiny", prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=1, logit_bias={str(eos): 100}
    ).choices[0]
    assert ended.finish_reason == "stop" and ended.logprobs is not None
    assert len(ended.logprobs.tokens or ()) == 4
    assert ended.text == "".join((ended.logprobs.tokens or [])[:3])
    assert (ended.logprobs.text_offset or [])[3] == len(ended.text)


def test_too_many_logprobs_of_a_prompt_are_refused_before_any_stream(gpt: openai.OpenAI) -> None:
    for fields in ({"n": 128, "logprobs": 20}, {"prompt": [[5] * 100] * 900, "logprobs": 2}):
        with pytest.raises(openai.BadRequestError) as caught:
            gpt.completions.create(**{**TOKENS, "prompt": [5] * 110, "stream": True, **fields})
        assert caught.value.param == "logprobs"
        assert "the limit is" in caught.value.message


@row("S0-14")
def test_a_prompt_that_does_not_fit_is_a_400_before_any_stream(gpt: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(messages=long, stream=True, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 256 tokens. However" in caught.value.message


def test_a_limit_beyond_the_context_is_cut_and_said(gpt: openai.OpenAI) -> None:
    reply = gpt.chat.completions.create(model="tiny", messages=HI, max_tokens=32000, seed=1)
    usage: Any = reply.usage
    assert usage.max_completion_tokens == 256 - usage.prompt_tokens
