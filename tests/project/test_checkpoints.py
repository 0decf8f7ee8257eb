"""The tiny checkpoints are what the other tests take them for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, NUM_TOKENS, VOCAB_SIZE


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
