"""The default model of the benchmarks. Starts nothing.

Thin and deep: a step of eight rows takes about twice as long as a step of one, as where weights are read from memory,
and is short enough that a server's own cost shows.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from tests.support.checkpoints import write_checkpoint

ARCHITECTURES = ("qwen3", "qwen3_5", "gpt_oss")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

HEAVY_SHAPE: dict[str, Any] = {
    "vocab_size": 98_304,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def write_tiny(folder: Path, architecture: str = ARCHITECTURES[0]) -> Path:
    """Some 0.35 M parameters, fp32. Greedy replies are whole words: never an end of turn, a marker, half a character.

    The other tokens' logits are 0, and among hundreds of words some logit is always above that.
    """
    write_checkpoint(folder, architecture, **(SHAPE if architecture == ARCHITECTURES[0] else {}))
    speak_in_words(folder)
    return folder


def write_heavy(folder: Path) -> Path:
    """A head of 200 MB in bf16, and hardly more than that to read in a step: 2 KiB of KV a token.

    Most weights are in the head because a prefill does not compute it. In bf16, because MLX's CPU backend converts such
    weights once for all rows of a step; products of fp32 and of quantised weights cost each row as much as the first.
    """
    write_checkpoint(folder, ARCHITECTURES[0], dtype="bfloat16", **HEAVY_SHAPE)
    speak_in_words(folder)
    return folder


def speak_in_words(folder: Path) -> None:
    """Change the head of the checkpoint there so."""
    weights_file = folder / "model.safetensors"
    weights = load_weights(weights_file)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    [head] = [name for name in weights if name.endswith("lm_head.weight")]
    rows = weights[head].shape[0]
    is_word = mx.array([is_word_token(tokenizer.id_to_token(row) or "") for row in range(rows)])
    weights[head] = mx.where(is_word[:, None], weights[head], 0.0)
    mx.eval(weights)
    mx.save_safetensors(str(weights_file), weights, metadata={"format": "mlx"})


def load_weights(file: Path) -> dict[str, mx.array]:
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    return weights


def is_word_token(token: str) -> bool:
    """Whether a vocabulary entry is a space and lower-case English letters. Tokenizers write the space as Ġ or ▁."""
    return len(token) > 2 and token[0] in "Ġ▁" and token[1:].isascii() and token[1:].isalpha() and token[1:].islower()
