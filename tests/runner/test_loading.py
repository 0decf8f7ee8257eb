"""Weights that come in slices: how large a slice is, and that the model is the one that is loaded at once."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import begin_loading, load_model
from vllm_mlx.runner.loading import slices

SMALL = 40_000  # bytes: less than the largest tensor of a tiny checkpoint


def test_slices_keep_the_limit_but_for_a_single_array() -> None:
    arrays = [mx.zeros((size,), mx.uint8) for size in (10, 20, 30, 100, 5, 5)]
    assert [[array.nbytes for array in held] for held in slices(arrays, 50)] == [[10, 20], [30], [100], [5, 5]]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "gpt_oss"])
def test_a_model_in_slices_is_the_one_that_is_loaded_at_once(
    checkpoint: Callable[..., Path], architecture: str
) -> None:
    found = find_checkpoint(str(checkpoint(architecture)))
    expected = tree_flatten(load_model(found, trust_remote_code=False).module.parameters())
    loading = begin_loading(found, trust_remote_code=False, slice_bytes=SMALL)
    seen = [0.0]
    while (model := loading.advance()) is None:
        seen.append(loading.progress)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 8
    assert loading.most_bytes <= max(SMALL, *(array.nbytes for _, array in expected))
    for (name, array), (other, sliced) in zip(expected, tree_flatten(model.module.parameters()), strict=True):
        assert name == other and mx.array_equal(array, sliced)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in checkpoint("qwen3").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    loading = begin_loading(find_checkpoint(str(copy)), trust_remote_code=False, slice_bytes=SMALL)
    loading.advance()
    [weights] = copy.glob("model*.safetensors")
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size // 2)
    with pytest.raises(ModelLoadError):
        while loading.advance() is None:
            pass


def test_a_text_checkpoint_is_not_said_to_lack_a_vision_encoder(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    found = find_checkpoint(str(checkpoint("qwen3_5")))
    model = begin_loading(found, trust_remote_code=False, has_drafts=True).complete()
    assert type(model).__name__ == "MultimodalModel" and not caplog.text
