"""A vision checkpoint is served with its images or refused in one line; text models never pay for it."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time

import mlx.core as mx
import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelLoadError, Unsupported
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.llm import LLM
from vllm_mlx.runner import calibrate
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.model import MultimodalModel, TextModel, weights_bytes

PICTURE = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)
ASKED = [{"role": "user", "content": "hello world"}]
SHOWN = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "?"}]}
]
VIDEO = [{"role": "user", "content": [{"type": "video", "video": [PICTURE] * 4}]}]


@pytest.fixture
def changed(checkpoint, tmp_path):
    """A copy of a vision checkpoint to change."""
    return shutil.copytree(checkpoint("vision:qwen3_vl"), tmp_path / "model")


def refusal(model) -> str:
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(model), memory_budget_bytes=1 << 30)
    text = caught.value.message
    assert "\n" not in text and "--text-only" in text
    return text


def test_damaged_processor_files_are_told(changed):
    for name in ("preprocessor_config.json", "processor_config.json"):
        (changed / name).write_text("{")
    assert "its processor cannot be loaded" in refusal(changed)


def test_text_only_is_not_advised_where_the_text_cannot_be_loaded(changed):
    weights = mx.load(str(changed / "model.safetensors"))
    weights.pop(next(name for name in weights if "lm_head" in name))
    mx.save_safetensors(str(changed / "model.safetensors"), weights, metadata={"format": "mlx"})
    (changed / "preprocessor_config.json").write_text("{")
    (changed / "processor_config.json").write_text("{")
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(changed), memory_budget_bytes=1 << 30)
    assert caught.value.message.endswith(". Complete the checkpoint.")


def test_the_text_of_a_family_that_mlx_lm_does_not_know_is_served_without_its_encoder(checkpoint):
    encoder = {"width": 32, "layers": 1, "heads": 2, "image_size": 28}
    found = find_checkpoint(str(checkpoint("language:step3p7", vision_config=encoder)))
    assert found.has_vision_encoder
    models = [load_model(found, trust_remote_code=False, text_only=text_only) for text_only in (False, True)]
    with_images, alone = (model.forward(mx.array([[5, 6, 7]]), model.new_caches()) for model in models)
    assert mx.array_equal(with_images, alone)
    assert weights_bytes(models[1].weights) < weights_bytes(models[0].weights)


def test_a_template_that_shows_no_images_is_told(changed):
    (changed / "chat_template.jinja").write_text("{% for message in messages %}{{ message.role }}{% endfor %}")
    assert "chat template shows no <|image_pad|>" in refusal(changed)


def test_a_tower_that_does_not_fit_its_processor_is_told(changed):
    for name in ("preprocessor_config.json", "processor_config.json"):
        values = json.loads((changed / name).read_text())
        values["merge_size"] = 1
        values.setdefault("image_processor", {})["merge_size"] = 1
        (changed / name).write_text(json.dumps(values))
    assert "cannot be served" in refusal(changed)


def no_tokens(model):
    config = json.loads((model / "config.json").read_text())
    del config["video_token_id"]
    (model / "config.json").write_text(json.dumps(config))


def no_place_in_the_template(model):
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("'video'", "'clip'"))


def a_template_that_fails(model):
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(
        template.replace("part.type == 'video'", "part.type == 'video' and raise_exception('no films')")
    )


def another_patch_size(model):
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 8, "merge_size": 2}
    (model / "video_preprocessor_config.json").write_text(json.dumps(video))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_tokens, "config.json names no tokens for one"),
        (another_patch_size, "one was tried at load: "),
        pytest.param(
            no_place_in_the_template,
            "the chat template shows no <|vision_start|><|video_pad|><|vision_end|> for one",
            marks=pytest.mark.full,
        ),
        pytest.param(a_template_that_fails, "the chat template fails on one: no films", marks=pytest.mark.full),
    ],
)
def test_videos_that_cannot_be_shown_are_refused_with_the_reason_and_images_are_served(changed, change, reason):
    change(changed)
    with LLM(str(changed), memory_budget_bytes=1 << 30) as llm:
        with pytest.raises(Unsupported, match=re.escape(f"takes no videos: {reason}")):
            llm.chat(VIDEO, max_tokens=4)
        assert llm.chat(SHOWN, temperature=0, max_tokens=4)[0].outputs[0].finish_reason is not None


def test_text_only_leaves_the_tower_out_and_says_the_same(checkpoint):
    path = checkpoint("vision:qwen3_vl")
    with LLM(str(path), memory_budget_bytes=1 << 30) as whole:
        assert whole.chat(SHOWN, temperature=0, max_tokens=4)[0].outputs[0].finish_reason is not None
        [expected] = whole.chat(ASKED, temperature=0, max_tokens=8)
    with LLM(str(path), memory_budget_bytes=1 << 30, text_only=True) as llm:
        [reply] = llm.chat(ASKED, temperature=0, max_tokens=8)
        assert reply.text == expected.text
        with pytest.raises(Unsupported):
            llm.chat(SHOWN, max_tokens=4)


def test_the_checkpoint_decides(checkpoint):
    vision, text = find_checkpoint(str(checkpoint("vision:qwen3_vl"))), find_checkpoint(str(checkpoint("qwen3_5")))
    assert isinstance(load_model(vision, trust_remote_code=False), MultimodalModel)
    assert isinstance(load_model(vision, trust_remote_code=False, text_only=True), TextModel)
    assert isinstance(load_model(text, trust_remote_code=False), TextModel)


def test_weights_without_a_tower_are_a_text_model(changed):
    weights = mx.load(str(changed / "model.safetensors"))
    weights = {name: weight for name, weight in weights.items() if "vision" not in name}
    mx.eval(weights)
    mx.save_safetensors(str(changed / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert not find_checkpoint(str(changed)).has_vision_encoder


def test_a_text_model_does_not_import_mlx_vlm(checkpoint):
    code = (
        "import sys\nfrom vllm_mlx.llm import LLM\n"
        f"with LLM({str(checkpoint('llama'))!r}, memory_budget_bytes=1 << 30) as llm:\n"
        "    llm.generate('hi', None)\n"
        "sys.exit('mlx_vlm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("setting", "expected"), [(None, 1 << 16), pytest.param(2 << 20, 2 << 20, marks=pytest.mark.full)]
)
def test_a_slow_encoder_sees_smaller_pictures_unless_a_size_is_set(checkpoint, monkeypatch, setting, expected):
    encode, clock, waited = calibrate.encode, time.perf_counter, []

    def slow(model, token_ids, item):
        waited.append(item.length / 7)  # seconds: 64 tokens are the largest image of this model
        return encode(model, token_ids, item)

    monkeypatch.setattr(calibrate, "encode", slow)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock() + sum(waited))
    engine = start_engine(EngineConfig(model=str(checkpoint("vision:qwen3_vl")), max_pixels=setting))
    asyncio.run(engine.shutdown(0))
    assert engine.model_facts["max_pixels"] == expected


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        ((100, 0.01), (1000, 0.1), 16_000, 4 << 20),  # linear: 1.6 s
        ((100, 0.01), (1000, 0.26), 16_000, 1 << 19),  # with attention: 46 s, 11.8, 3.1, 0.9
        ((100, 0.5), (1000, 0.6), 16_000, 4 << 20),  # half a second for every image: 2.3 s
        ((100, 0.5), (1000, 1.4), 16_000, 1 << 19),  # 16.4 s, 8.4, 4.4, 2.4
        ((100, 9.0), (1000, 90.0), 16_000, 256 * 256),
        ((256, 9.0), (256, 9.0), 256, 4 << 20),  # all images have one size
        ((64, 0.1), (1280, 5.0), 1280, 1 << 17),  # the processor scales all images above 512² down
    ],
)
def test_the_largest_size_that_is_read_in_time_follows_from_two_images(low, high, most, expected):
    assert calibrate.timely_pixels(low, high, most) == expected


def test_a_larger_picture_is_scaled_down(checkpoint):
    from vllm_mlx.engine.loading import load_vision
    from vllm_mlx.formats.tokenizer import Tokenizer

    from ..engine.vision_harness import picture

    found = find_checkpoint(str(checkpoint("vision:qwen3_vl")))
    tokenizer = Tokenizer.load(found.path)
    sizes = []
    for max_pixels in (1 << 20, 96 * 160, 64 * 64):
        vision = load_vision(EngineConfig(model="m", max_pixels=max_pixels), found, tokenizer)
        sizes.append(len(vision.render_with_inputs(picture(0)).token_ids))
    assert sizes[0] == sizes[1] > sizes[2]
    vision.scale_down_to(1 << 20)
    sizes.append(len(vision.render_with_inputs(picture(0)).token_ids))
    vision.scale_down_to(64 * 64)
    sizes.append(len(vision.render_with_inputs(picture(0)).token_ids))
    assert sizes[3:] == [sizes[0], sizes[2]]
