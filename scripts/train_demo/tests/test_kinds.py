"""Every kind of conversation in the demo's training can be made; the bundled template writes it as training read it."""

import random
from collections.abc import Callable

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scripts.train_demo import mixture
from scripts.train_demo.chat import check_template
from vllm_mlx.runner.checkpoint import DEMO_PATH

AMOUNT = 10


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO_PATH)


@pytest.mark.parametrize("make", [*mixture.KINDS.values(), *mixture.PRACTICE.values()], ids=lambda make: make.__name__)
def test_the_template_writes_what_training_read(tokenizer: PreTrainedTokenizerFast, make: Callable) -> None:
    rng = random.Random(make.__name__)
    check_template(tokenizer, [make(rng) for _ in range(AMOUNT)])
