"""mlx-vlm's language models whose layers have caches of their own resume from copies: tiny ones, random weights."""

import importlib
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import BASE, randomise
from tests.support.language_families import LANGUAGES
from tests.support.rows import cases, row
from vllm_mlx.cache import layers, snapshot
from vllm_mlx.cache.node import Piece

TOKENS = [(31 * place) % 500 for place in range(80)]
SIZES: dict[str, dict[str, Any]] = {
    "llama4": {
        "model_type": "llama4_text", "head_dim": 16, "attention_chunk_size": 24, "num_local_experts": 4,
        "intermediate_size_mlp": 128,
    },
    "minimax_m3_vl": LANGUAGES["minimax_m3"],
    **{name: LANGUAGES[name]["text_config"] for name in ("glm5_next", "qwen4_exp")},
}  # fmt: skip
WHOLE = {
    "llama4": set(),
    "minimax_m3_vl": {"MiniMaxM3KVCache"},
    "glm5_next": {"PoolingCache"},
    "qwen4_exp": {"QSAKVCache"},
}


@pytest.fixture(scope="module", params=SIZES)
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    name = request.param
    package = f"mlx_vlm.models.{name}"
    config = importlib.import_module(f"{package}.config").TextConfig.from_dict({**BASE, **SIZES[name]})
    model = importlib.import_module(f"{package}.language").LanguageModel(config)
    randomise(model, 0)
    return name, model


def run(family: tuple[str, Any], caches: list[Any], *edges: int) -> mx.array:
    """Feed the tokens between successive edges, chunk by chunk. The logits after each: (chunks, vocab)."""
    name, model = family
    found = []
    for start, end in pairwise(edges):
        positions = mx.arange(start, end)[None]
        if name in ("qwen4_exp", "glm5_next"):
            positions = mx.broadcast_to(positions[None], (3, 1, end - start))
        inputs = {"position_ids": positions} if hasattr(model, "get_rope_index") else {}
        found.append(model(mx.array([TOKENS[start:end]]), cache=caches, **inputs).logits[0, -1])
        layers.leave_window(caches)
        mx.eval(found, layers.state_arrays(caches))
    return mx.stack(found)


@row("S4-11")
@pytest.mark.parametrize(
    "fed", cases([(0, 30, 37), (0, 37), (0, 30, *range(31, 38)), (0, 1)], [(0, 30, *range(31, 38)), (0, 1)])
)
def test_a_restored_row_goes_on_like_one_that_computes_everything(
    family: tuple[str, Any], fed: tuple[int, ...]
) -> None:
    name, model = family
    caches, length = list(model.make_cache()), fed[-1]
    run(family, caches, *fed)
    rule = snapshot.resume_rule(caches)
    assert rule is not None and {type(leaf).__name__ for leaf in layers.copied_whole(caches)} == WHOLE[name]
    kv, states = layers.split(caches)
    view = snapshot.view(kv, 0, states, 0, length)
    segment, window_start, state = snapshot.capture(view, 0, length, rule.window)
    run(family, caches, length, 60, 61)
    restored = list(model.make_cache())
    piece = Piece(segment=segment, start=0, end=length, window_start=window_start, take=length)
    snapshot.restore(restored, [piece], state, length=length, capacity=80)
    later = [60, *range(61, 71)]
    found = run(family, restored, length, *later)
    expected = run(family, list(model.make_cache()), 0, *later)
    assert mx.allclose(found, expected, atol=1e-4)
