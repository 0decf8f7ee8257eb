"""The default model of the benchmarks, and prompts that no server has seen. It starts nothing.

Thin and deep: a step of eight rows takes about twice as long as a step of one, as where weights are read from memory,
and is short enough that a server's own cost shows.
"""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from scripts.served import BenchmarkError
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


def write_tiny(folder: Path, architecture: str = ARCHITECTURES[0]) -> Path:
    """Write some 0.35 M parameters in fp32. Greedy replies are whole words, without ends of turn and markers.

    The other tokens' logits are 0, and among hundreds of words some logit is always above that.
    """
    write_checkpoint(folder, architecture, **(SHAPE if architecture == ARCHITECTURES[0] else {}))
    speak_in_words(folder)
    return folder


def speak_in_words(folder: Path) -> None:
    """Change the head of a checkpoint so that greedy replies are whole words."""
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
    """Return whether an entry is a space and lower-case English letters. Tokenizers write the space as Ġ or ▁."""
    return len(token) > 2 and token[0] in "Ġ▁" and token[1:].isascii() and token[1:].isalpha() and token[1:].islower()


class Prompts:
    """Random words, exactly as many tokens as asked for. Two prompts hardly share a first word, so no cache helps."""

    def __init__(self, tokenizer: Any, seed: int = 0):
        names = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
        self._words = [name[1:] for name in names if name is not None and is_word_token(name)]
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        if len(self._words) < 100:
            raise BenchmarkError("This checkpoint's tokenizer has too few whole words to make prompts of.")

    def text(self, num_tokens: int) -> str:
        words = self._random.choices(self._words, k=num_tokens)
        while (excess := self._num_tokens(words) - num_tokens) != 0:
            # The first word has no space before it and may be several tokens.
            words = words[:-excess] if excess > 0 else words + self._random.choices(self._words, k=-excess)
        return " ".join(words)

    def _num_tokens(self, words: list[str]) -> int:
        return len(self._tokenizer.encode(" ".join(words), add_special_tokens=False))
