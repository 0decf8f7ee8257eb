"""A family whose images or videos we would serve wrongly is found out at load."""

import mlx.core as mx
import pytest

from tests.support.rows import cases
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.media.vision import VisionProbe, VisionProcessor
from vllm_mlx.runner import family_check
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.model import MultimodalModel


@pytest.fixture
def loaded(checkpoint):
    """A family, of a name that nothing is known about, and what it is tried with."""

    def load(family: str, dtype: mx.Dtype) -> tuple[MultimodalModel, VisionProbe]:
        found = find_checkpoint(str(checkpoint(f"vision:{family}")))
        vision = VisionProcessor.load(found.path, found.config, Tokenizer.load(found.path), max_pixels=1 << 20)
        model = load_model(found, trust_remote_code=False)
        model.module.set_dtype(dtype)
        model.module.config.model_type = "unheard_of"
        return model, vision.probe()

    return load


@pytest.fixture
def tried(loaded):
    def check(family: str, dtype: mx.Dtype = mx.float32) -> None:
        model, probe = loaded(family, dtype)
        family_check.check_family(model, probe.images.prompt, probe.images.inputs)
        assert model.media.num_encoded == 0, "what was tried is forgotten"

    return check


@pytest.fixture
def video_fault(loaded):
    def check(family: str, dtype: mx.Dtype = mx.float32) -> str | None:
        model, probe = loaded(family, dtype)
        assert len(probe.video.prompt.media) > 1, "it is tried in pieces"
        fault = family_check.media_fault(model, probe.video.prompt, probe.video.inputs)
        assert model.media.num_encoded == 0, "what was tried is forgotten"
        return fault

    return check


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4", "llava"])
@pytest.mark.parametrize("dtype", cases([mx.float32, mx.bfloat16], [mx.bfloat16]))
def test_what_is_right_passes_at_any_precision(tried, family, dtype):
    tried(family, dtype)


def test_attention_in_one_direction_is_found_out(tried, monkeypatch):
    monkeypatch.setattr(MultimodalModel, "bidirectional_images", False)
    with pytest.raises(ModelLoadError, match="something else"):
        tried("gemma4")


def test_positions_of_plain_text_are_found_out(tried, monkeypatch):
    monkeypatch.setattr(MultimodalModel, "items_in_grid", lambda self, seq: [])
    with pytest.raises(ModelLoadError, match="places their tokens"):
        tried("qwen3_vl")


def test_features_of_another_image_are_found_out(tried, monkeypatch):
    features = MultimodalModel._features
    monkeypatch.setattr(MultimodalModel, "_features", lambda self, seq, item: features(self, seq, seq.prompt.media[0]))
    with pytest.raises(ModelLoadError, match="inputs_embeds"):
        tried("llava")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("dtype", cases([mx.float32, mx.bfloat16], [mx.bfloat16]))
def test_a_video_that_is_right_passes_at_any_precision(video_fault, family, dtype):
    assert video_fault(family, dtype) is None


def test_a_video_placed_as_plain_text_is_found_out(video_fault, monkeypatch):
    monkeypatch.setattr(MultimodalModel, "items_in_grid", lambda self, seq: [])
    assert "places their tokens" in video_fault("qwen3_vl")


def test_pieces_of_a_video_in_each_others_place_are_found_out(video_fault, monkeypatch):
    features = MultimodalModel._features
    monkeypatch.setattr(MultimodalModel, "_features", lambda self, seq, item: features(self, seq, seq.prompt.media[0]))
    assert "inputs_embeds" in video_fault("qwen3_5")
