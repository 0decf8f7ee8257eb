"""A row whose state is lost fails: on empty caches its reply would be wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import PrefillChunk, StepOutput, StepPlan
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.device import DeviceWatch
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.runner import Runner

CHUNK = 8


@pytest.fixture
def runner(checkpoint: Callable[..., Path]) -> Runner:
    model = load_model(find_checkpoint(str(checkpoint("qwen3"))), trust_remote_code=False)
    return Runner(model, DeviceWatch(1 << 40))


def row_of(num_tokens: int) -> Sequence:
    prompt = PromptInputs(token_ids=tuple(range(1, num_tokens + 1)))
    return Sequence(seq_id=num_tokens, prompt=prompt, sampling=TokenSampling(temperature=0), max_tokens=4)


def is_lost(output: StepOutput, seq: Sequence) -> bool:
    return [seq_id for seq_id, error in output.failed if "is lost" in str(error)] == [seq.seq_id]


def test_a_row_that_was_dropped_does_not_go_on(runner: Runner) -> None:
    seq, beside = row_of(2 * CHUNK), row_of(1)
    runner.prefill([PrefillChunk(seq, 0, seq.prefill_end)])
    runner.reset()
    output = runner.decode(StepPlan(decode=((seq,), (beside,)), reads=True))
    assert is_lost(output, seq)
    assert [token.seq_id for token in output.tokens] == [beside.seq_id], "it has no token that was computed"


def test_nor_does_the_second_chunk_of_a_prompt(runner: Runner) -> None:
    seq = row_of(2 * CHUNK)
    runner.prefill([PrefillChunk(seq, 0, CHUNK)])
    runner.reset()
    output = runner.prefill([PrefillChunk(seq, CHUNK, seq.prefill_end)])
    assert is_lost(output, seq) and not output.prefilled
