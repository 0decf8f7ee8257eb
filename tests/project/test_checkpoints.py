"""The tiny checkpoints are what the other tests take them for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ARCHITECTURES, NUM_TOKENS, VOCAB_SIZE, write_checkpoint

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look it up.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "content": "Sunny."},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def render(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    import mlx_lm.utils

    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_loads_and_its_greedy_reply_wanders(checkpoint: Callable[..., Path], architecture: str) -> None:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    folder = checkpoint(architecture)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
    model, tokenizer = mlx_lm.load(str(folder))
    prompt = mx.array(tokenizer.encode("hello world"))
    reply = [int(token) for token, _ in generate_step(prompt, model, max_tokens=40)]
    assert len(set(reply)) > 20
    assert max(reply) < VOCAB_SIZE
    assert len(tokenizer.get_vocab()) == NUM_TOKENS


def test_the_same_arguments_make_the_same_weights(tmp_path: Path) -> None:
    weights = [
        (write_checkpoint(tmp_path / name, "llama", seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_options_change_the_configuration(checkpoint: Callable[..., Path]) -> None:
    config = json.loads((checkpoint("qwen3", max_position_embeddings=512) / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    nested = json.loads((checkpoint("qwen3_5", max_position_embeddings=512) / "config.json").read_text())
    assert nested["text_config"]["max_position_embeddings"] == 512


def test_the_qwen3_template_renders_tools_reasoning_calls_and_results(checkpoint: Callable[..., Path]) -> None:
    text = render(checkpoint("qwen3"), CONVERSATION, tools=TOOLS)
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in text
    assert "<think>\nLook it up.\n</think>\n\n<tool_call>\n" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith("<tool_response>\nSunny.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_the_qwen3_5_template_writes_calls_as_xml_and_opens_the_reasoning(checkpoint: Callable[..., Path]) -> None:
    text = render(checkpoint("qwen3_5"), CONVERSATION, tools=TOOLS)
    assert "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert render(checkpoint("qwen3_5"), CONVERSATION, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_the_gemma_template_folds_the_system_text_into_the_first_turn(checkpoint: Callable[..., Path]) -> None:
    text = render(checkpoint("gemma3_text"), CONVERSATION[:2])
    turn = "<bos><start_of_turn>user\nYou are terse.\n\nWeather?<end_of_turn>\n"
    assert text == turn + "<start_of_turn>model\n"
