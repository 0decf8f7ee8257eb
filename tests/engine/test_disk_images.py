"""Prompts with images resume from disk with mlx-vlm's tokens: behind the image, inside it, and with another image."""

from pathlib import Path

import pytest

from tests.engine.test_disk_any_load import started

from .vision_harness import VisionModel, full

NUM_TOKENS = 6
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
SHOWN = [TEXT, 1, " What is in this image?"]
LATER = {
    "the same": (SHOWN,),
    "a new question": (SHOWN, ["a test"], ["Describe it in detail."]),
    "another image": ([TEXT, 4, " What is in this image?"],),
    "one more image": (SHOWN, ["a test"], ["and ", 2, " this?"]),
    "the same behind another one": ([TEXT, 2, 1, " compare"],),
}


@pytest.fixture(
    scope="module", params=["qwen3_5", *map(full, ["gemma4", "qwen3_vl", "qwen2_5_vl", "gemma3", "mistral3"])]
)
def model(request, checkpoint):
    return VisionModel(checkpoint(f"vision:{request.param}"))


def test_after_a_restart_images_have_the_librarys_tokens(model: VisionModel, tmp_path: Path) -> None:
    with started(model.path, tmp_path, driver=model.driver()) as server:
        server.driver.add(model.prompt(*LATER["the same"]), NUM_TOKENS)
        server.run()
    hits = {}
    for name, turns in LATER.items():
        with started(model.path, tmp_path, driver=model.driver()) as server:
            seq_id = server.driver.add(model.prompt(*turns), NUM_TOKENS)
            server.run()
            assert server.driver.replies[seq_id].token_ids == model.reply(*turns, max_tokens=NUM_TOKENS), name
            report = server.disk.report()
            assert report.off_reason is None, name
            hits[name] = report.hits
    assert hits["a new question"] == 1
