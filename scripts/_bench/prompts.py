"""Prompts that no server has seen: random words, exactly as many tokens as asked for."""

import random
from typing import Any

from .checkpoint import is_word_token
from .client import BenchmarkError


class Prompts:
    """Two of them hardly share a first word, so that no prefix cache helps."""

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
