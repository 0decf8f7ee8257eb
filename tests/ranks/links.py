"""What two ranks sum, and shards that they run, without an engine."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import mlx.core as mx

from vllm_mlx.cache.footprint import footprint
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.ranks.sums import measure_link, prove_sums
from vllm_mlx.runner.libraries import load_model, make_prompt_cache
from vllm_mlx.runner.model import weights_bytes
from vllm_mlx.runner.ranked import Ranked

PROMPT = mx.array([list(range(40))])
WIDTH, CHUNK = 64, 96


def right_sums(ranks: Ranks) -> list[float]:
    prove_sums(ranks, WIDTH, CHUNK)
    return list(astuple(measure_link(ranks, WIDTH, CHUNK)))


def wrong_sums(ranks: Ranks) -> str:
    """Rank 1 adds other numbers than rank 0 believes, so that all sums are wrong."""
    try:
        prove_sums(ranks, WIDTH, CHUNK, seed=1000 * ranks.rank)
    except ModelLoadError as error:
        assert ranks.exchange("error", error.message)[0] == error.message
        return error.message
    return "no error"


def run_shards(ranks: Ranks, paths: list[str]) -> list[list[int]]:
    """On each rank: the best next token of each model, the bytes of its weights and of a token's state."""
    found = []
    for path in paths:
        model = load_model(Path(path), lazy=True)[0]
        model.shard(ranks.group)
        caches = make_prompt_cache(model)
        best = int(mx.argmax(model(PROMPT, cache=caches)[0, -1]).item())
        found.append([best, weights_bytes([model]), footprint(caches).bytes_per_token])
    told = ranks.exchange("found", found)
    assert told[0] == told[1], "all ranks take the same"
    return found


class LastStage(Ranked):
    """Rank 1 gets its input from rank 0, not from the ids that rows feed, as the last stage of a pipeline does."""

    def __init__(self, ranks: Ranks):
        self._lockstep = ranks

    def extend(self, seqs: Any, positions: Any, tokens: mx.array, caches: Any) -> mx.array:
        own = tokens[..., None] * mx.ones((7,)) if self._lockstep.rank == 0 else mx.zeros((*tokens.shape, 7))
        return mx.distributed.all_sum(own, group=self._lockstep.group)


def ids_that_nobody_needs(ranks: Ranks) -> Any:
    logits = LastStage(ranks).decode((), (), mx.array([3 + ranks.rank]), [])
    return logits[0].tolist()
