"""An encoder's vectors follow the rules of its checkpoint, and are the same alone and in any batch."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from tests.support.encoders import CLASSIFIERS, FAMILIES, make_encoder
from tests.support.running_encoder import RunningEncoder, cosine, facts_of
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.encoder import begin_loading_encoder

LONG = "The quick brown fox says hello world, and def main(): return 1 + 2 été 東京 🙂. "
TEXTS = ["x", "hello world", LONG * 4, LONG]


def alone(encoder: RunningEncoder, texts=TEXTS, **options) -> np.ndarray:
    return np.concatenate([encoder.vectors([text], **options) for text in texts])


def states(encoder: RunningEncoder, text: str) -> np.ndarray:
    """The last hidden states of one text, as mlx-vlm's module computes them: (tokens, width)."""
    ids = list(encoder.ids_of([text])[0])
    return np.array(encoder.model.module(mx.array([ids])).last_hidden_state.astype(mx.float32))[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "likeness"), [("float32", 0.99999), ("bfloat16", 0.9999), ("float16", 0.9999)])
def test_a_vector_is_the_same_alone_and_in_any_batch(family, dtype, likeness, tmp_path):
    encoder = RunningEncoder(make_encoder(tmp_path / family, family, pooling="cls", dtype=dtype))
    expected = alone(encoder)
    assert np.isfinite(expected).all() and cosine(expected[0], expected[2]) < 0.99
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1, 1, 2]):
        got = encoder.vectors([TEXTS[place] for place in order])
        assert all(cosine(one, expected[place]) >= likeness for one, place in zip(got, order, strict=True))


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_each_rule_of_pooling(pooling, normalize, tmp_path):
    path = make_encoder(tmp_path / "bert", "bert", pooling=pooling, normalize=normalize)
    encoder = RunningEncoder(path)
    for text, vector in zip(TEXTS, encoder.vectors(TEXTS), strict=True):
        found = states(encoder, text)
        pooled = {"cls": found[0], "mean": found.mean(0), "max": found.max(0), "lasttoken": found[-1]}[pooling]
        np.testing.assert_allclose(vector, pooled / np.linalg.norm(pooled) if normalize else pooled, atol=1e-5)


def test_dense_layers_follow_the_pooling_with_their_activations(tmp_path):
    layers = ((48, "Tanh"), (40, "GELU"), (32, "ReLU"), (16, "Identity"))
    path = make_encoder(tmp_path / "bert", "bert", dense=layers, normalize=False)
    encoder = RunningEncoder(path)
    value = mx.array(states(encoder, LONG).mean(0))
    functions = {
        "Tanh": mx.tanh,
        "GELU": lambda x: x * (1 + mx.erf(x / 2**0.5)) / 2,
        "ReLU": lambda x: mx.maximum(x, 0),
    }
    for number, (_, name) in enumerate(layers, start=2):
        weights = mx.load(str(path / f"{number}_Dense/model.safetensors"))
        value = functions.get(name, lambda x: x)(weights["linear.weight"] @ value + weights["linear.bias"])
    np.testing.assert_allclose(encoder.vectors([LONG])[0], np.array(value), atol=1e-5)
    assert encoder.facts.num_dimensions == encoder.model.num_dimensions == 16


def test_the_dense_layers_of_gemma_are_computed_once(tmp_path):
    path = make_encoder(tmp_path / "gemma", "gemma3_text", normalize=False)
    encoder = RunningEncoder(path)
    value = states(encoder, "hello world").mean(0)  # shorter than the window
    for folder in ("2_Dense", "3_Dense"):
        value = np.array(mx.load(str(path / folder / "model.safetensors"))["linear.weight"]) @ value
    np.testing.assert_allclose(encoder.vectors(["hello world"])[0], value, rtol=1e-3, atol=1e-3)


def test_gemma_keeps_to_its_window(tmp_path):
    """In mlx-vlm's own pass every layer sees all tokens."""
    ids = [[3 + place % 300 for place in range(100)]]
    narrow, wide, wider = (
        RunningEncoder(make_encoder(tmp_path / str(window), "gemma3_text", sliding_window=window)).vectors(ids)[0]
        for window in (32, 220, 400)
    )
    assert cosine(narrow, wide) < 0.9999 and cosine(wide, wider) > 0.999999


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_lie_between_0_and_1_and_are_the_same_in_any_batch(family, tmp_path):
    encoder = RunningEncoder(make_encoder(tmp_path / family, family, task="rerank"))
    scores = encoder.scores("the brown fox", TEXTS)
    assert scores.shape == (4,) and ((scores > 0) & (scores < 1)).all() and len(set(scores)) == 4
    for text, score in zip(TEXTS, scores, strict=True):
        assert encoder.scores("the brown fox", [text])[0] == pytest.approx(score, abs=1e-5)


def test_a_classifier_reads_the_types_of_tokens(tmp_path):
    path = make_encoder(tmp_path / "bert", "bert", task="rerank")
    encoder = RunningEncoder(path)
    weights = mx.load(str(path / "model.safetensors"))
    name = "bert.embeddings.token_type_embeddings.weight"
    weights[name] = mx.stack([weights[name][0], weights[name][0]])
    mx.save_safetensors(str(shutil.copytree(path, tmp_path / "alike") / "model.safetensors"), weights, {"format": "pt"})
    alike = RunningEncoder(tmp_path / "alike")
    assert abs(encoder.scores("a fox", ["hello world"]) - alike.scores("a fox", ["hello world"])) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "modernbert", "llama_bidirec"])
def test_rotary_settings_of_newer_files_are_read(family, tmp_path):
    path = make_encoder(tmp_path / "old", family)
    new = shutil.copytree(path, tmp_path / "new")
    config = json.loads((new / "config.json").read_text())
    names = {
        "full_attention": ("rope_theta", "global_rope_theta"),
        "sliding_attention": ("rope_local_base_freq", "local_rope_theta"),
    }
    parts = {
        kind: {"rope_type": "default", "rope_theta": next(config.pop(name) for name in keys if name in config)}
        for kind, keys in names.items()
        if any(name in config for name in keys)
    }
    config["rope_parameters"] = parts if len(parts) > 1 else parts["full_attention"]
    if family == "gemma3_text":
        config["_sliding_window_pattern"] = config.pop("sliding_window_pattern")
    (new / "config.json").write_text(json.dumps(config))
    expected, got = RunningEncoder(path).vectors([LONG]), RunningEncoder(new).vectors([LONG])
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "qwen3", "gemma3_text"])
def test_quantised_weights(family, tmp_path):
    vectors = [
        RunningEncoder(make_encoder(tmp_path / str(bits), family, hidden_size=64, bits=bits)).vectors(TEXTS)
        for bits in (None, 8)
    ]
    assert min(map(cosine, *vectors)) > 0.99


def test_weights_are_read_in_slices(tmp_path):
    path = make_encoder(tmp_path / "bert", "bert", dense=((32, "Tanh"),))
    loading = begin_loading_encoder(find_checkpoint(str(path)), facts_of(path), slice_bytes=1 << 16)
    parts = 1
    while (model := loading.advance()) is None:
        parts += 1
    assert parts > 5 and loading.progress == 1 and len(model.weights) == 2


@pytest.mark.parametrize(("family", "task"), [("bert", "embedding"), ("bert", "rerank"), ("gemma3_text", "embedding")])
@pytest.mark.parametrize("damage", [float("nan"), 0.0, None])
def test_damaged_weights_are_told(family, task, damage, tmp_path):
    path = make_encoder(tmp_path / "model", family, task=task)
    file = path / "model.safetensors"
    weights = mx.load(str(file))
    name = next(name for name in weights if name.endswith("mlp.down_proj.weight") or "output.dense.weight" in name)
    if damage is None:
        weights.pop(name)
    elif damage == 0:
        weights = {name: mx.zeros_like(array) for name, array in weights.items()}
    else:
        weights[name] = mx.full(weights[name].shape, damage)
    mx.save_safetensors(str(file), weights, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"Cannot load .*model"):
        RunningEncoder(path)


def test_a_dense_layer_without_its_weights_is_told(tmp_path):
    path = make_encoder(tmp_path / "model", "bert", dense=((32, "Tanh"),))
    (path / "2_Dense/model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="2_Dense"):
        RunningEncoder(path)


def test_modernbert_has_the_exact_activation(tmp_path):
    model = RunningEncoder(make_encoder(tmp_path / "m", "modernbert")).model
    part, x = model.module.layers[0].mlp, mx.random.normal((1, 5, 64))
    value, gate = mx.split(part.Wi(x), 2, axis=-1)
    expected = part.Wo(value * (1 + mx.erf(value / 2**0.5)) / 2 * gate)
    np.testing.assert_allclose(np.array(part(x)), np.array(expected), atol=1e-6)
