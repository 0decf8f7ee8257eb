"""Each token of the content has its log-probability in the event that shows its text, once and in order."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.named_formats import ReplyFormats
from vllm_mlx.core.events import FinishReason, TextDelta, TokenLogprob
from vllm_mlx.core.messages import Message, TextPart, ToolSpec
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.pipeline import OutputPipeline
from vllm_mlx.formats.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CHAT = Request(
    request_id="r",
    messages=(Message("user", (TextPart("hi"),)),),
    tools=(ToolSpec("now", None, None),),
    sampling=SamplingParams(logprobs=0),
)


def content(tokenizer: Tokenizer, ids: list[int], request: Request = CHAT, step: int = 1) -> list[TextDelta]:
    """Token number n has the log-probability -n."""
    output = OutputPipeline(
        tokenizer,
        request,
        PromptInputs(token_ids=(1,)),
        ReplyFormats("qwen3", "hermes"),
        stop_token_ids=tokenizer.eos_token_ids,
    )
    tokens = [TokenOutput(0, token_id, TokenLogprob(token_id, -float(n))) for n, token_id in enumerate(ids)]
    events = []
    for start in range(0, len(tokens), step):
        events += output.feed(tokens[start : start + step])
    events += output.finish(FinishReason.STOP, ids[-1] if ids[-1] in tokenizer.eos_token_ids else None)
    return [event for event in events if isinstance(event, TextDelta)]


def numbers(deltas: list[TextDelta]) -> list[int]:
    return [-int(logprob.logprob) for delta in deltas for logprob in delta.logprobs]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    "parts",
    [
        ["+hello world"],
        ["<think>", "\nhm", "\n", "</think>", "\n\n", "+ok"],
        ["<think>\nhm\n</think>\n\n", "+東京 🙂"],
        ["+one\n", CALL, "\n", CALL, "+\ntwo", "<|im_end|>"],
        ["+a", "<|endoftext|>", "+b"],
        ["+" + CALL.replace("now", "rm").removesuffix("\n</tool_call>"), "\n</tool_call>"],
    ],
)
def test_tokens_of_the_content_and_no_others(qwen: Tokenizer, parts: list[str], step: int) -> None:
    """Parts marked with + are content."""
    ids: list[int] = []
    expected: list[int] = []
    for part in parts:
        part_ids = encode(qwen, part.removeprefix("+"))
        if part.startswith("+"):
            expected += range(len(ids), len(ids) + len(part_ids))
        ids += part_ids
    deltas = content(qwen, ids, step=step)
    assert numbers(deltas) == expected


def test_each_event_has_the_tokens_of_its_text(qwen: Tokenizer) -> None:
    ids = encode(qwen, "hello 東 world")
    for delta in content(qwen, ids):
        assert b"".join(qwen.token_bytes(logprob.token_id) for logprob in delta.logprobs).decode() == delta.text


def test_stop_string_takes_its_tokens_with_it(qwen: Tokenizer) -> None:
    before = encode(qwen, "hello ")
    ids = [*before, *encode(qwen, "<|im_start|>"), *encode(qwen, "xyz")]
    request = replace(CHAT, sampling=SamplingParams(logprobs=0, stop=("<|im_start|>x",)))
    assert numbers(content(qwen, ids, request)) == list(range(len(before)))


def test_completion_with_echo(qwen: Tokenizer) -> None:
    request = Request(request_id="r", prompt="hello", echo=True, sampling=SamplingParams(logprobs=0))
    ids = encode(qwen, " <think> world")
    deltas = content(qwen, ids, request)
    assert "".join(delta.text for delta in deltas) == "hello <think> world"
    assert numbers(deltas) == list(range(len(ids)))


def test_none_are_given_where_none_were_asked_for(qwen: Tokenizer) -> None:
    request = replace(CHAT, sampling=SamplingParams())
    assert numbers(content(qwen, encode(qwen, "hello"), request)) == []


FRAGMENTS = [
    "hello",
    " ",
    "\n",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "now"}',
    "{",
    "東",
    "<|im_start|>",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12), st.sampled_from([(), ("lo\n", ">he")]))
def test_no_token_is_given_twice_and_order_is_kept(
    qwen: Tokenizer, fragments: list[str], stop: tuple[str, ...]
) -> None:
    request = replace(CHAT, sampling=SamplingParams(logprobs=0, stop=stop))
    ids = encode(qwen, "".join(fragments))
    single = content(qwen, ids, request)
    assert all(a < b for a, b in itertools.pairwise(numbers(single)))
    assert numbers(content(qwen, ids, request, step=100)) == numbers(single)


@pytest.mark.parametrize("text", ["Hello 東京 🙂 wörld  x", " two  blanks", "東"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_each_token_of_an_echo_has_its_place(any_tokenizer: Tokenizer, text: str, as_ids: bool) -> None:
    """Bytes of one character share its place, and what the tokenizer puts around a text takes none."""
    ids = tuple(any_tokenizer.encode(text, add_special_tokens=True))
    request = Request(
        request_id="r",
        prompt=ids if as_ids else text,
        echo=True,
        max_prompt_logprobs=100,
        sampling=SamplingParams(logprobs=0, max_tokens=0),
    )
    output = OutputPipeline(any_tokenizer, request, PromptInputs(token_ids=ids), ReplyFormats())
    output.feed_prompt([TokenLogprob(token_id, -1.0) for token_id in ids[1:]])
    [echo, _] = output.finish(FinishReason.LENGTH)
    assert isinstance(echo, TextDelta)
    if not as_ids:
        assert echo.text == text
    assert tuple(token.token_id for token in echo.logprobs) == ids
    assert [token.logprob for token in echo.logprobs] == [None, *[-1.0] * (len(ids) - 1)]
    starts = [token.offset for token in echo.logprobs]
    assert starts == sorted(starts)
    spelled: dict[int, bytes] = {}
    for token_id, start in zip(ids, starts, strict=True):
        added = any_tokenizer.added_token(token_id)
        spelled[start] = spelled.get(start, b"") + (b"" if added else any_tokenizer.token_bytes(token_id))
    for start, end in itertools.pairwise([*spelled, len(echo.text)]):
        assert spelled[start].decode().strip(" ") == echo.text[start:end].strip(" ")


def test_the_token_that_ended_the_reply_follows_those_of_an_echo(qwen: Tokenizer) -> None:
    sampling = SamplingParams(logprobs=0)
    request = Request(request_id="r", prompt="hello", echo=True, max_prompt_logprobs=100, sampling=sampling)
    ids, [end] = encode(qwen, "hello"), encode(qwen, "<|im_end|>")
    prompt = PromptInputs(token_ids=tuple(ids))
    output = OutputPipeline(qwen, request, prompt, ReplyFormats(), stop_token_ids=frozenset({end}))
    events = output.feed([TokenOutput(0, end, TokenLogprob(end, -1.0))])
    *rest, _ = output.finish(FinishReason.STOP, end)
    assert [token.token_id for event in [*events, *rest] for token in event.logprobs][-1] == end
