"""The phrase that ends reasoning when its budget is spent: it is reasoning for the client, and no tag is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.rote import rote_checkpoint
from tests.support.rows import row
from tests.support.running import Running
from vllm_mlx.core.config import ReasoningStrings
from vllm_mlx.formats.tokenizer import Tokenizer

from .watched import engine_served

HI: Any = [{"role": "user", "content": "hi"}]
PHRASE = "\n\nThat is enough."
THOUGHT = "ABCDEFGHIJKL"  # a token for each letter


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rote_checkpoint(tmp_path_factory.mktemp("rote"), "qwen3", thought_tokens=len(THOUGHT))


@pytest.fixture
def phrase_ids(path: Path) -> list[int]:
    """The tokens of the phrase up to the tag."""
    return Tokenizer.load(path).encode(f"{PHRASE}\n", add_special_tokens=False)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    strings = ReasoningStrings("<think>", f"{PHRASE}\n</think>\n\n")
    with engine_served(path, reasoning_parser="qwen3", tool_call_parser="hermes", reasoning_config=strings) as running:
        yield running


@row("S3-7", "S3-16")
@pytest.mark.parametrize("budget", [0, 5, 11])
def test_a_forced_phrase_is_reasoning_without_its_tag(gpt: openai.OpenAI, phrase_ids: list[int], budget: int) -> None:
    fields: Any = {"thinking_token_budget": budget, "structured_outputs": {"choice": ["yes", "no"]}}
    ask: Any = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 100, "extra_body": fields}
    reply = gpt.chat.completions.create(**ask)
    message: Any = reply.choices[0].message
    assert message.content in ("yes", "no")
    assert message.reasoning_content == message.reasoning == (THOUGHT[:budget] + PHRASE).removeprefix("\n")
    deltas: list[Any] = [chunk.choices[0].delta for chunk in gpt.chat.completions.create(**ask, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    usage: Any = reply.usage
    assert usage.completion_tokens_details.reasoning_tokens == budget + len(phrase_ids)
