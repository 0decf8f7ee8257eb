"""The bundled checkpoint answers the frozen prompts word for word."""

import json

import pytest
from mlx_lm import load as load_text

from tests.support.demo_cases import Asker, frozen_cases
from tests.support.rows import cases
from vllm_mlx.runner.checkpoint import DEMO_PATH

MAX_BYTES = 8_000_000


@pytest.fixture(scope="module")
def demo() -> Asker:
    return Asker(DEMO_PATH)


USUAL = (
    "hello, thinking", "small sum", "recall from the system prompt, thinking", "json, thinking", "one tool, thinking",
    "answer from a tool result", "picture before the words", "three pictures",
)  # fmt: skip
CASES = {case.name: case for case in frozen_cases()}


@pytest.mark.parametrize("name", cases(CASES, USUAL))
def test_reply_is_the_frozen_one(demo: Asker, name: str) -> None:
    assert demo.reply(CASES[name]) == CASES[name].reply


def test_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_PATH.iterdir() if path.is_file()) <= MAX_BYTES


def test_declares_its_context() -> None:
    config = json.loads((DEMO_PATH / "config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] == 131_072


def test_mlx_lm_finds_reasoning_tools_and_stop_tokens() -> None:
    _, tokenizer = load_text(str(DEMO_PATH))
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
    assert tokenizer.eos_token_ids == set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
