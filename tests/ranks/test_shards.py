"""Which checkpoints can be cut over ranks, what each rank takes, and what is refused says why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import VISION
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks.shards import Shard, several_macs, shard_of
from vllm_mlx.runner.checkpoint import find_checkpoint

Make = Callable[..., Path]
CUT = ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3", "glm4_moe_lite"]
WHOLE = ["gemma3_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba", "qwen3_next", "smollm3", "cohere2"]


def shard(path: Path, num_ranks: int, *, text_only: bool = False) -> Shard:
    return shard_of(find_checkpoint(str(path)), num_ranks, text_only=text_only)


def refusal(path: Path, num_ranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        shard(path, num_ranks)
    return caught.value.message.removeprefix(str(path))


@pytest.mark.parametrize("name", CUT)
def test_a_rank_takes_less_than_the_model_and_more_than_its_part(checkpoint: Make, name: str) -> None:
    whole, half = shard(checkpoint(name), 1), shard(checkpoint(name), 2)
    assert whole.weights_bytes / 2 < half.weights_bytes < whole.weights_bytes
    assert half.num_sums >= 2 * 4, "two a layer"
    latent = name in ("deepseek_v3", "glm4_moe_lite")
    assert half.footprint.bytes_per_token == whole.footprint.bytes_per_token // (1 if latent else 2)


@pytest.mark.parametrize("name", WHOLE)
def test_a_family_without_tensor_parallelism_is_refused(checkpoint: Make, name: str) -> None:
    assert refusal(checkpoint(name), 2) == (
        f" cannot be cut over 2 Macs: mlx-lm has no tensor parallelism for '{name}'; "
        "choose another model, or leave out --tensor-parallel-size."
    )


HALVES = "; set --tensor-parallel-size 2."
CANNOT = "mlx-lm cannot divide its weights"
SIXES = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
NO_OTHER = "; choose another model, or leave out --tensor-parallel-size."


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "reason"),
    [
        ("llama", 4, {}, f"its 2 key-value heads do not divide by 4{HALVES}"),
        ("gpt_oss", 4, {}, f"its 2 key-value heads do not divide by 4{HALVES}"),
        ("qwen3", 3, {}, f"its 4 attention heads do not divide by 3{HALVES}"),
        ("qwen3_5", 4, {}, f"its 2 linear key heads do not divide by 4{HALVES}"),
        ("qwen3_5", 2, {"linear_num_value_heads": 5, "linear_num_key_heads": 5}, "its 5 linear key heads do not"),
        ("qwen3_5", 2, {"vocab_size": 1023}, f"{CANNOT} (group size 2 must divide vocab_size 1023){NO_OTHER}"),
        ("gpt_oss", 2, {"intermediate_size": 63}, f"{CANNOT} (Array split does not result in sub arrays"),
        ("llama", 3, SIXES, f"{CANNOT} (Cannot shard the output of size 128 across 3 devices){HALVES}"),
        ("llama", 2, {"bits": 4}, f"{CANNOT} ([quantize] The last dimension of the matrix needs to be divisible"),
        ("llama", 2, {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}, "its 3 attention heads"),
    ],
)  # fmt: skip
def test_a_number_that_does_not_divide_is_named(
    checkpoint: Make, name: str, num_ranks: int, options: dict[str, int], reason: str
) -> None:
    assert refusal(checkpoint(name, **options), num_ranks).startswith(f" cannot be cut over {num_ranks} Macs: {reason}")


def test_quantised_weights_are_cut_with_their_scales(checkpoint: Make) -> None:
    path = checkpoint("llama", bits=4, head_dim=32)
    whole, half = shard(path, 1), shard(path, 2)
    assert half.weights_bytes < whole.weights_bytes
    assert half.weights_bytes > whole.weights_bytes / 2


def test_key_value_heads_that_a_family_repeats_are_accepted(checkpoint: Make) -> None:
    path = checkpoint("qwen3_5", linear_num_key_heads=4)
    assert shard(path, 4).footprint.bytes_per_token == shard(path, 2).footprint.bytes_per_token


def test_images_are_refused_and_their_text_is_not(checkpoint: Make) -> None:
    path = checkpoint(f"{VISION}qwen3_5")
    assert refusal(path, 2) == " takes images, and a model on several Macs serves text only. Set --text-only."
    assert shard(path, 2, text_only=True).num_ranks == 2


def test_no_weights_are_read(checkpoint: Make, tmp_path: Path) -> None:
    """A file of weights of which only the header is there suffices."""
    path = checkpoint("qwen3")
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (path / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(weights[:8], "little")
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(weights[:end])
        stream.truncate(len(weights))  # zeros
    assert shard(tmp_path, 2) == shard(path, 2)


def test_the_fewest_macs_that_hold_the_weights_are_named(checkpoint: Make) -> None:
    model = find_checkpoint(str(checkpoint("deepseek_v3")))
    sizes = {num: shard_of(model, num).weights_bytes for num in (1, 2, 4)}
    for num in (2, 4):
        size = f"{sizes[num] / 1e6:.1f} MB"
        expected = f" {num} Macs with as much memory hold it, {size} of weights and 0.8 kB a token of context on each: "
        assert several_macs(model, sizes[num] * 8 // 7 + 1).startswith(expected)
    assert several_macs(model, 1000) == ""
    assert several_macs(find_checkpoint(str(checkpoint("gemma3_text"))), 1 << 40) == ""
    images = several_macs(find_checkpoint(str(checkpoint(f"{VISION}qwen3_5"))), 1 << 40)
    assert images.endswith(": --tensor-parallel-size 2 and --text-only (experimental).")
