"""Replies in bf16 and 4 bits, at the widths of real models: alone, in a batch, in chunks, cached. Equal up to rounding.

In half precision the order of additions shows, and tokens need not be equal. So a reply is compared with one pass of
the library over prompt and reply: each token must be the likeliest there, or nearly so, with the same probability.
"""

import importlib.util
import random
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.support.checkpoints import ARCHITECTURES
from tests.support.engine_driver import Driver, Reply
from tests.support.metal_widths import CONDITIONS, MIXTURES, WIDE, text_config, wide_config
from tests.support.vision_families import FAMILIES
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.runner.calibrate import Calibration

NUM_TOKENS = 6
CHUNK = 16
LIKELIEST = TokenSampling(temperature=0, num_top_logprobs=0)
NEAR_TIE = 0.25  # in standard deviations of the logits; the two likeliest tokens are some 0.3 apart
SAME = 0.06  # mean difference of log probabilities; rounding gives 0.02, and a lost chunk 0.07 to 0.8
_random = random.Random(4)
PROMPTS = [[_random.randrange(500) for _ in range(length)] for length in (1, 21, 17, 45)]
SPEED = Calibration(tokens_per_s=1000, overhead_s=0.001, chunk_bytes_per_token=10_000)
IN_GATE = {("llama", 4)}
NEEDS_METAL = pytest.mark.skipif(
    not mx.metal.is_available(), reason="MLX multiplies the experts' matrices in bf16 on Metal only"
)


def kinds() -> list:
    found = []
    for architecture in WIDE:
        for bits in (None, 4):
            if bits and architecture.startswith("vision:"):
                continue
            marks = [] if (architecture, bits) in IN_GATE else [pytest.mark.full]
            if bits is None and architecture in MIXTURES:
                marks.append(NEEDS_METAL)
            found.append(pytest.param((architecture, bits), marks=marks, id=f"{architecture}-{bits or 'bf16'}"))
    return found


@pytest.fixture(scope="module", params=kinds())
def folder(request, checkpoint) -> Path:
    architecture, bits = request.param
    if bits is None:
        return checkpoint(architecture, dtype="bfloat16", **WIDE[architecture])
    dtype = "bfloat16" if mx.metal.is_available() else "float32"  # a CPU takes ten times as long in bf16
    return checkpoint(architecture, dtype=dtype, bits=bits, **WIDE[architecture])


@lru_cache(maxsize=1)
def _library(folder: Path):
    return load_model(folder)[0]


class Replies:
    """Replies of an engine, and the library's opinion of them."""

    def __init__(self, driver: Driver, folder: Path, prompts: list[list[int]]):
        self.seq_ids = [driver.add(prompt, NUM_TOKENS, LIKELIEST) for prompt in prompts]
        driver.run()
        self._folder = folder
        self._replies = [(prompt, driver.replies[seq_id]) for prompt, seq_id in zip(prompts, self.seq_ids, strict=True)]

    def tokens(self) -> list[list[int]]:
        return [reply.token_ids for _, reply in self._replies]

    def check(self) -> None:
        for prompt, reply in self._replies:
            logits = self._library_logits(prompt, reply)
            taken = logits[np.arange(NUM_TOKENS), reply.token_ids]
            assert ((logits.max(-1) - taken) / logits.std(-1)).max() < NEAR_TIE
            assert self._difference(logits, reply) < SAME

    def check_that_a_lost_chunk_shows(self) -> None:
        prompt, reply = self._replies[-1]
        assert self._difference(self._library_logits(prompt[CHUNK:], reply), reply) > SAME

    def _library_logits(self, prompt: list[int], reply: Reply) -> np.ndarray:
        logits = _library(self._folder)(mx.array([[*prompt, *reply.token_ids[:-1]]]))[0, len(prompt) - 1 :]
        return np.array(logits.astype(mx.float32))

    def _difference(self, logits: np.ndarray, reply: Reply) -> float:
        """The mean difference of the log probabilities of the reply's tokens."""
        totals = np.logaddexp.reduce(logits, axis=-1)
        expected = logits[np.arange(NUM_TOKENS), reply.token_ids] - totals
        return float(np.abs(expected - [logprob.logprob for logprob in reply.logprobs]).mean())


def test_replies_are_the_librarys_alone_batched_chunked_and_cached(folder):
    driver = Driver(folder, calibration=SPEED, prefix_cache=False)
    alone = Replies(driver, folder, PROMPTS[-1:])
    alone.check()
    alone.check_that_a_lost_chunk_shows()
    Replies(driver, folder, PROMPTS).check()
    chunked = Driver(folder, calibration=SPEED, max_prefill_chunk=CHUNK)
    first = Replies(chunked, folder, PROMPTS[1:])
    first.check()
    longer = [[*prompt, *reply, 7] for prompt, reply in zip(PROMPTS[1:], first.tokens(), strict=True)]
    for prompts in (longer, PROMPTS[1:]):
        cached = Replies(chunked, folder, prompts)
        cached.check()
        assert all(chunked.seqs[seq_id].num_cached_tokens for seq_id in cached.seq_ids)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "vision:qwen3_5"])
def test_widths_pass_the_conditions_of_the_kernels_that_real_models_run_on(architecture):
    config = wide_config(architecture)
    concerned = [condition for condition in CONDITIONS if condition.concerns(config)]
    assert concerned
    assert [condition.kernel for condition in concerned if not condition.holds(config)] == []
    assert config["hidden_size"] % 128 == 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *(f"vision:{family}" for family in FAMILIES)])
def test_no_tiny_checkpoint_has_widths_with_which_a_kernel_computes_nonsense(architecture):
    config = text_config(architecture)
    unchecked = [condition for condition in CONDITIONS if not condition.is_checked and condition.concerns(config)]
    assert [condition.kernel for condition in unchecked if not condition.holds(config)] == []


def test_each_kernel_has_a_checkpoint_that_passes():
    for condition in CONDITIONS:
        configs = [wide_config(architecture) for architecture in WIDE]
        assert any(condition.concerns(config) and condition.holds(config) for config in configs), condition.kernel


INSTALLED = [condition for condition in CONDITIONS if not condition.file.startswith("mlx/")]  # MLX's own is not


@pytest.mark.parametrize("condition", INSTALLED, ids=lambda condition: condition.kernel)
def test_the_table_is_of_the_installed_libraries(condition):
    package, _, file = condition.file.partition("/")
    folder = Path(importlib.util.find_spec(package).origin).parent
    assert condition.text in (folder / file).read_text(encoding="utf-8"), "read the kernel again"
