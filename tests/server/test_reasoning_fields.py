"""Replies of every format, token by token through the output pipeline and a socket: reasoning has fields of its own."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.formats.families import FAMILIES, Family
from tests.formats.support import REASONING, REASONING_FORMATS, TOOL_FORMATS
from tests.guidance.random_sampler import sampler
from tests.support.named_formats import ReplyFormats
from tests.support.rows import row
from vllm_mlx.core.events import FinishReason, GenerationEvent, Started
from vllm_mlx.core.request import Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.families import FAMILIES as PRODUCT
from vllm_mlx.formats.pipeline import OutputPipeline
from vllm_mlx.formats.tokenizer import Tokenizer

from .fakes import PROMPT_TOKENS, FakeEngine, Script

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
THOUGHT, ANSWER = "a hm < 1 東京", "Done 1 < 2."


def calls_of(name: str) -> Family:
    """Return the format in which checkpoints with this format of reasoning write their calls."""
    rows = [one for one in PRODUCT if one.reasoning is REASONING_FORMATS[name] and one.calls is not None]
    reads = rows[0].calls.reads if rows and rows[0].calls else TOOL_FORMATS["hermes"]
    return next(family for family in FAMILIES if TOOL_FORMATS[family.name] is reads)


def tokenizer_of(name: str, calls: Family) -> Tokenizer:
    """Return a tokenizer that has the tags as tokens."""
    tags = [tag for tag in (*REASONING_FORMATS[name].tags, *calls.tokens) if tag[0] in "<[" and tag[-1] in ">]"]
    return sampler((*dict.fromkeys(tags),)).tokenizer


def plays(tokenizer: Tokenizer, text: str, formats: ReplyFormats, *, is_open: bool) -> Callable[[Request, int], Script]:
    """Let the engine sample `text`. `is_open`: the prompt has opened the reasoning."""

    def play(request: Request, index: int) -> Script:
        prompt = PromptInputs(token_ids=(1,) * PROMPT_TOKENS, starts_in_reasoning=is_open)
        output = OutputPipeline(tokenizer, request, prompt, formats)
        events: list[GenerationEvent] = [Started(PROMPT_TOKENS, 0)]
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            events += output.feed([TokenOutput(0, token_id)])
        return [*events, *output.finish(FinishReason.STOP)]

    return play


def streamed(gpt: openai.OpenAI, **fields: Any) -> tuple[str, str, str, str]:
    """Return the texts of both reasoning fields, the content, and the names of calls."""
    deltas = [
        chunk.choices[0].delta
        for chunk in gpt.chat.completions.create(model="tiny", messages=HI, stream=True, **fields)
        if chunk.choices
    ]
    texts = [
        "".join(getattr(delta, field, None) or "" for delta in deltas)
        for field in ("reasoning_content", "reasoning", "content")
    ]
    names = [call.function.name for delta in deltas for call in delta.tool_calls or () if call.function]
    return texts[0], texts[1], texts[2], "".join(name or "" for name in names)


def whole(gpt: openai.OpenAI, **fields: Any) -> tuple[str, str, str, str]:
    message: Any = gpt.chat.completions.create(model="tiny", messages=HI, **fields).choices[0].message
    names = "".join(call.function.name for call in message.tool_calls or ())
    return message.reasoning_content, message.reasoning, message.content or "", names


@row("S0-1", "S0-2")
@pytest.mark.parametrize("is_open", [False, True], ids=["the reply opens it", "the prompt does"])
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_in_its_fields_alone(engine: FakeEngine, gpt: openai.OpenAI, name: str, is_open: bool) -> None:
    opens, closes = REASONING[name]
    calls = calls_of(name)
    tokenizer, formats = tokenizer_of(name, calls), ReplyFormats(name, calls.name)
    thought = f"{'' if is_open else opens}{THOUGHT}{closes}"
    shown = THOUGHT if REASONING_FORMATS[name].fills_content and not is_open else ""  # in place of an empty content
    for text, expected in (
        (thought + ANSWER, (THOUGHT, THOUGHT, ANSWER, "")),
        (thought + calls.calls(("now", {})), (THOUGHT, THOUGHT, "", "now")),
        (thought, (THOUGHT, THOUGHT, shown, "")),
    ):
        engine.play = plays(tokenizer, text, formats, is_open=is_open)
        assert whole(gpt, tools=TOOLS) == streamed(gpt, tools=TOOLS) == expected, text
