"""Ministral 3 with images: each row's attention is scaled by its own position, in any company."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.vision_harness import VisionModel

SCALED = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,  # the scale grows every 16 tokens
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 2.0,
    }
}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
PROMPTS = [[(13 * row + 5 * place) % 500 for place in range(length)] for row, length in enumerate((3, 60, 20))]


@pytest.fixture(scope="module", params=[{}, SLIDING], ids=["full", "sliding"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> VisionModel:
    return VisionModel(checkpoint("vision:mistral3", **SCALED, **request.param))


def test_layers_keep_their_kinds_of_cache(model: VisionModel) -> None:
    rule = model.driver().engine.default.facts.resume_rule
    has_windows = "sliding" in model.path.joinpath("config.json").read_text()
    assert rule is not None and rule.window == (24 if has_windows else None)


def test_rows_of_one_batch_get_the_replies_that_they_get_alone(model: VisionModel) -> None:
    driver = model.driver(prefix_cache=False)
    alone = [driver.generate([ids], max_tokens=20)[0] for ids in PROMPTS]
    assert driver.generate(PROMPTS, max_tokens=20) == alone


def test_the_reply_is_mlx_vlms_own(model: VisionModel) -> None:
    turns = (["What is in this image? ", 1],)
    prompt = model.prompt(*turns)
    assert model.driver().generate([prompt], max_tokens=10) == [model.reply(*turns, max_tokens=10)]
