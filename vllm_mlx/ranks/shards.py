"""Finds whether a checkpoint can be divided among ranks, and the size of each shard. It reads only headers.

mlx-lm's own class is asked: it is built with lazy weights, cut as a rank would cut it, and given a token. Nothing of
that is computed, so shapes alone decide, and everything that the class cannot do is an error here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from ..cache.footprint import footprint
from ..core.errors import ConfigError, first_line, setting
from ..core.memory import RowFootprint, readable
from ..runner.checkpoint import Checkpoint
from ..runner.libraries import knows, load_model, make_prompt_cache
from ..runner.load_model import explaining
from ..runner.model import weights_bytes
from ..runner.model_types import text_config
from ..runner.proofs import LIBRARY_ERRORS

MOST_RANKS = 8  # more Macs are not proposed
_SHARE = 7 / 8  # of the memory, at most, so that conversations have room
_HEADS = {
    "num_attention_heads": "attention heads",
    "linear_num_key_heads": "linear key heads",
    "linear_num_value_heads": "linear value heads",
}
_KV_HEADS = {"num_key_value_heads": "key-value heads"}  # which some families repeat or do not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a model that each of `num_ranks` machines holds. A single rank holds all of it."""

    weights_bytes: int
    footprint: RowFootprint  # of a row's state
    num_ranks: int = 1
    num_sums: int = 0  # sums over all ranks that a token waits for, one after another
    whole: "Shard | None" = None  # bytes that a single machine would hold

    @property
    def text(self) -> str:
        per_token = self.footprint.bytes_per_token
        context = f" and {per_token / 1e3:.1f} kB a token of context" if per_token else ""
        return f"{readable(self.weights_bytes)} of weights{context}"

    @property
    def comparison(self) -> str:
        assert self.whole is not None, "there are several ranks"
        return f"{self.text} on each of {self.num_ranks} Macs; one Mac would take {self.whole.text}"


class _Group:
    """A stand-in for rank 0 of a group while weights are cut, so that no other process is needed."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def shard_of(
    checkpoint: Checkpoint, num_ranks: int, *, text_only: bool = False, trust_remote_code: bool = False
) -> Shard:
    """Describe a rank's shard. Raises ConfigError, with the reason and a remedy, if the model cannot be cut."""
    if num_ranks > 1 and checkpoint.has_vision_encoder and not text_only and knows(checkpoint.config):
        raise ConfigError(
            f"{checkpoint.path} takes images, and a model on several Macs serves text only. Set {setting('text_only')}."
        )
    found = _try(checkpoint, num_ranks, trust_remote_code)
    if isinstance(found, Shard):
        return found
    others = range(num_ranks - 1, 1, -1)
    fits = next((num for num in others if isinstance(_try(checkpoint, num, trust_remote_code), Shard)), None)
    name = setting("tensor_parallel_size")
    advice = f"choose another model, or leave out {name}" if fits is None else f"set {name} {fits}"
    raise ConfigError(f"{checkpoint.path} cannot be cut over {num_ranks} Macs: {found}; {advice}.")


def several_macs(checkpoint: Checkpoint, budget_bytes: int, *, trust_remote_code: bool = False) -> str:
    """Say how many Macs could hold a model that is too large for one, and the bytes on each.

    The sentence begins with a space. It is empty if the model cannot be cut, or is too large even for that many.
    """
    try:
        found = (_try(checkpoint, num_ranks, trust_remote_code) for num_ranks in range(2, MOST_RANKS + 1))
        shard = next(one for one in found if isinstance(one, Shard) and one.weights_bytes <= _SHARE * budget_bytes)
    except (ConfigError, StopIteration):
        return ""
    text_only = f" and {setting('text_only')}" if checkpoint.has_vision_encoder else ""
    how = f"{setting('tensor_parallel_size')} {shard.num_ranks}{text_only}"
    return f" {shard.num_ranks} Macs with as much memory hold it, {shard.text} on each: {how} (experimental)."


def _try(checkpoint: Checkpoint, num_ranks: int, trust_remote_code: bool) -> Shard | str:
    """Return the shard, or the reason why the model cannot be cut. Raises ModelLoadError if it cannot load."""
    with explaining(checkpoint, "mlx-lm", trust_remote_code):
        module = load_model(checkpoint.path, lazy=True, trust_remote_code=trust_remote_code)[0]
    if num_ranks > 1 and not hasattr(module, "shard"):
        return f"mlx-lm has no tensor parallelism for {checkpoint.architecture!r}"
    text = text_config(checkpoint.config)
    if reason := _indivisible(text, _HEADS, num_ranks):
        return reason
    try:
        whole = _measured(module)
        if num_ranks == 1:
            return whole
        num_sums = _cut(module, num_ranks) + 1  # the first is that of the ids
        return replace(_measured(module), num_ranks=num_ranks, num_sums=num_sums, whole=whole)
    except (*LIBRARY_ERRORS, AssertionError, ArithmeticError) as error:
        reason = f"mlx-lm cannot divide its weights ({first_line(error, 300).rstrip('.')})"
        return _indivisible(text, _KV_HEADS, num_ranks) or reason


def _measured(module: Any) -> Shard:
    caches = make_prompt_cache(module)
    module(mx.array([[0]]), cache=caches)
    return Shard(weights_bytes=weights_bytes([module]), footprint=footprint(caches))


def _cut(module: Any, num_ranks: int) -> int:
    """Cut the weights as rank 0 does, and let the rest of the pass run alone. Returns the number of its sums."""
    group = _Group(num_ranks)
    # A group of one, by a backend that no Mac has: those that ranks use must not be initialised here.
    alone = mx.distributed.init(backend="nccl")
    module.shard(group)
    num_sums = 0
    for _, layer in module.named_modules():
        names = [name for name, value in vars(layer).items() if value is group]
        num_sums += "sharding_group" in names
        num_sums += isinstance(layer, (ShardedToAllLinear, QuantizedShardedToAllLinear))
        for name in names:
            setattr(layer, name, alone)
    return num_sums


def _indivisible(text: Mapping[str, Any], names: Mapping[str, str], num_ranks: int) -> str | None:
    for name, what in names.items():
        if isinstance(count := text.get(name), int) and count % num_ranks:
            return f"its {count} {what} do not divide by {num_ranks}"
    return None
