"""Rows that verified drafts hold the state of what they kept: it equals that of a row that read the same text anew."""

import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, OWN_ATTENTION
from tests.support.rows import cases
from vllm_mlx.cache import layers
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.runner.batch import Batch
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.masks import Masks
from vllm_mlx.runner.model import Model
from vllm_mlx.runner.proofs import prove_rows
from vllm_mlx.runner.verify import verify

VISION = ("vision:qwen3_5", "vision:qwen3_5_moe", "vision:gemma3")
# Text models whose recurrent layers record no states; all other families are promised drafts.
WITHOUT_DRAFTS = ("qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "granitemoehybrid", "jamba")
LENGTHS = (23, 7, 61)
GREEDY = TokenSampling(temperature=0)


FAMILIES = [name for name in (*ARCHITECTURES, *OWN_ATTENTION, *VISION) if name not in WITHOUT_DRAFTS]


@pytest.fixture(params=cases(FAMILIES, ["gemma3_text", "vision:qwen3_5"]))
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Model:
    found = load_model(find_checkpoint(str(checkpoint(request.param))), trust_remote_code=False)
    prove_rows(found)
    assert found.no_drafts is None
    return found


def start(model: Model, seq: Sequence) -> Batch:
    """A row that has read all its tokens but the last."""
    caches = model.new_caches()
    for low in range(0, seq.prefill_end, 16):
        model.prefill(seq, low, min(low + 16, seq.prefill_end), caches)
        layers.leave_window(caches)
        mx.eval(layers.state_arrays(caches))
    return Batch.of_row(model, seq, caches, seq.prefill_end)


def gathered(batches: list[Batch]) -> Batch:
    places = {batch.seq_ids[0]: (batch, 0) for batch in batches}
    return Batch.gather([batch.groups[0] for batch in batches], places)


def held(batch: Batch, seq: Sequence) -> list[mx.array]:
    view = batch.view(seq.seq_id, seq.prefill_end)
    return layers.arrays([view.attention, view.windows, view.recurrent])


def test_state_after_rejections_equals_that_of_a_cold_row(model: Model) -> None:
    rng = random.Random(7)
    lengths = LENGTHS if model.no_shared_forward is None else LENGTHS[:1]
    seqs = [
        Sequence(
            seq_id=number,
            prompt=PromptInputs(token_ids=tuple(rng.randrange(500) for _ in range(length))),
            sampling=GREEDY,
            max_tokens=100,
        )
        for number, length in enumerate(lengths)
    ]
    batch = gathered([start(model, seq) for seq in seqs])
    plain = {seq.seq_id: greedy(model, seq, 40) for seq in seqs}
    num_drafted = num_accepted = 0
    for _ in range(12):
        drafts = {}
        for seq in seqs:
            coming = plain[seq.seq_id][seq.num_output_tokens :][: rng.randrange(6)]
            drafts[seq.seq_id] = tuple(token if rng.random() < 0.7 else (token + 1) % 500 for token in coming)
        tokens, verified = verify(batch, drafts, Masks())
        for token in tokens:
            seqs[token.seq_id].output_token_ids.append(token.token_id)
        num_drafted += sum(row.num_drafted for row in verified)
        num_accepted += sum(row.num_accepted for row in verified)
    assert 0 < num_accepted < num_drafted
    for seq in seqs:
        assert seq.output_token_ids == plain[seq.seq_id][: seq.num_output_tokens]
        for warm, cold in zip(held(batch, seq), held(start(model, seq), seq), strict=True):
            assert warm.shape == cold.shape
            assert mx.abs(warm - cold).max().item() <= 1e-4 * max(1.0, mx.abs(cold).max().item())


def greedy(model: Model, seq: Sequence, num_tokens: int) -> list[int]:
    row, found = start(model, seq), []
    for _ in range(num_tokens):
        found += [token.token_id for token in row.launch().read()]
    return found
