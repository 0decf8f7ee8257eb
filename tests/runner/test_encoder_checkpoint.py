"""An encoder's declarations come from its files or from the settings; nothing is guessed."""

import json

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.encoders import FAMILIES, make_encoder
from tests.support.running_encoder import facts_of
from vllm_mlx.core.errors import ModelLoadError

SIGNS = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")


def change(file, **values):
    """Change a JSON object; a value of None removes the key."""
    given = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({name: value for name, value in {**given, **values}.items() if value is not None}))


def use_modules(path, *kinds):
    modules = [
        {"idx": place, "name": str(place), "path": folder, "type": kind} for place, (kind, folder) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))


def refusal(path, **settings) -> str:
    with pytest.raises(ModelLoadError) as caught:
        facts_of(path, **settings)
    assert str(path) in caught.value.message and "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_say_what_an_embedder_is(family, tmp_path):
    prompts = {"query": "q: ", "document": ""}
    path = make_encoder(
        tmp_path / "m", family, pooling="max", normalize=False, prompts=prompts, default_prompt="query", max_tokens=77
    )
    facts = facts_of(path)
    assert (facts.task, facts.is_causal, facts.pooling, facts.normalize) == ("embedding", False, "max", False)
    assert (facts.prompts, facts.default_prompt, facts.max_tokens) == (prompts, "query", 77)
    assert (facts.num_dimensions, facts.dimensions) == (64, ())


def test_chat_models_are_no_encoders(tmp_path):
    for name in ("qwen3", "llama", "gemma3_text"):
        assert facts_of(checkpoint(name)) is None
    path = make_encoder(tmp_path / "m", "qwen3")
    assert facts_of(path, task="chat") is None


@pytest.mark.parametrize("family", ["bert", "gemma3_text", "lfm2", "ministral3", "llama_bidirec", "xlm-roberta"])
def test_an_encoder_without_the_files_needs_the_settings(family, tmp_path):
    path = make_encoder(tmp_path / "m", family, pooling=None)
    assert 'pooling = "cls"' in refusal(path) and "--pooling" in refusal(path)
    assert "normalize = true" in refusal(path, pooling="mean")
    facts = facts_of(path, pooling="mean", normalize=False, prompts={"a": "b"})
    assert (facts.task, facts.pooling, facts.normalize, facts.prompts) == ("embedding", "mean", False, {"a": "b"})


def test_a_causal_model_becomes_an_embedder_by_its_setting(tmp_path):
    path = make_encoder(tmp_path / "m", "qwen3", pooling=None)
    assert facts_of(path) is None
    facts = facts_of(path, task="embedding", pooling="lasttoken", normalize=True)
    assert (facts.task, facts.pooling, facts.normalize) == ("embedding", "lasttoken", True)


def test_settings_replace_the_files(tmp_path):
    path = make_encoder(tmp_path / "m", "bert", pooling="cls", prompts={"query": "q: "}, default_prompt="query")
    facts = facts_of(path, pooling="mean", normalize=False, prompts={"other": "o: "}, max_model_len=100)
    assert (facts.pooling, facts.normalize, facts.max_tokens) == ("mean", False, 100)
    assert (facts.prompts, facts.default_prompt) == ({"other": "o: "}, None)


@pytest.mark.parametrize("name", SIGNS)
def test_each_file_of_sentence_transformers_is_a_sign(name, tmp_path):
    path = make_encoder(tmp_path / "m", "qwen3")
    for other in SIGNS:
        if other != name:
            (path / other).unlink()
    if name == SIGNS[2]:
        assert "--pooling" in refusal(path)
    else:
        assert facts_of(path, pooling="lasttoken", normalize=True).task == "embedding"


def test_pooling_alone_does_not_say_that_vectors_are_scaled(tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    (path / "modules.json").unlink()
    assert "--normalize" in refusal(path)
    assert facts_of(path, normalize=True).pooling == "mean"


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False}, "weightedmean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_mean_tokens": False}, "mean_sqrt_len"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"include_prompt": False}, "without the prompt"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["cls", "mean"]}, "cls and mean"),
    ],
)
def test_rules_of_pooling_that_are_not_served(pooling, name, tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    change(path / "1_Pooling/config.json", **pooling)
    assert name in refusal(path)
    assert facts_of(path, pooling="mean").pooling == "mean"


def test_the_newer_form_of_a_pooling_config(tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    kept = {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}
    (path / "1_Pooling/config.json").write_text(json.dumps(kept))
    use_modules(
        path,
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
        ("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize"),
    )
    assert (facts_of(path).pooling, facts_of(path).normalize) == ("lasttoken", True)


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "LayerNorm"),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Dense"),
        ("WordEmbeddings", "Pooling"),
        ("MLMTransformer", "SpladePooling"),
        ("Transformer", "WeightedLayerPooling", "Pooling"),
        ("Router",),
        ("StaticEmbedding",),
        ("CLIPModel",),
    ],
)
def test_modules_that_are_not_served_are_refused_by_name(kinds, tmp_path):
    path = make_encoder(tmp_path / "m", "bert", dense=((8, "Tanh"),))
    use_modules(
        path, *((f"sentence_transformers.models.{kind}", "2_Dense" if kind == "Dense" else "") for kind in kinds)
    )
    assert all(kind in refusal(path) for kind in kinds)


@pytest.mark.parametrize("kind", ["pylate.models.Dense.Dense", "custom_st.Transformer"])
def test_modules_of_other_packages_are_refused_by_name(kind, tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    use_modules(path, ("sentence_transformers.models.Transformer", ""), (kind, "1_Dense"))
    assert kind in refusal(path)


@pytest.mark.parametrize(
    "changed", [{"activation_function": "torch.nn.modules.activation.Mish"}, {"use_residual": True}]
)
def test_dense_layers_that_are_not_served(changed, tmp_path):
    path = make_encoder(tmp_path / "m", "bert", dense=((8, "Tanh"),))
    change(path / "2_Dense/config.json", **changed)
    assert "dense layer" in refusal(path)


def test_the_dense_layers_of_gemma_have_no_other_activation(tmp_path):
    path = make_encoder(tmp_path / "m", "gemma3_text")
    change(path / "2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh")
    assert "Tanh" in refusal(path)


@pytest.mark.parametrize(
    "family",
    ["nomic_bert", "mpnet", "roberta", "distilbert", "deberta-v2", "new", "t5", "jina_embeddings_v3", "eurobert"],
)
def test_families_that_only_encode_are_refused_by_name(family, tmp_path):
    path = make_encoder(tmp_path / "m", "bert", pooling=None)
    change(path / "config.json", model_type=family, architectures=["SomeForMaskedLM"])
    assert family in refusal(path) and "modernbert" in refusal(path)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama", "gemma2", "qwen3_vl"])
def test_embedders_of_chat_families_are_refused_by_name(family, tmp_path):
    path = make_encoder(tmp_path / "m", "qwen3")
    change(path / "config.json", model_type=family)
    assert family in refusal(path)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"is_decoder": True}),
        ("xlm-roberta", {"hidden_act": "gelu_new"}),
        ("modernbert", {"hidden_activation": "silu"}),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen3", {"use_sliding_window": True}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("ministral3", {"sliding_window": 128}),
        ("gemma3_text", {"hidden_activation": "gelu"}),
    ],
)
def test_values_that_the_modules_do_not_compute(family, values, tmp_path):
    path = make_encoder(tmp_path / "m", family)
    change(path / "config.json", **values)
    assert next(iter(values)) in refusal(path)


@pytest.mark.parametrize(
    ("family", "values", "side"),
    [
        ("qwen3", {"is_causal": False}, "later"),
        ("qwen3", {"use_bidirectional_attention": True}, "later"),
        ("gemma3_text", {"use_bidirectional_attention": False}, "earlier"),
        ("lfm2", {"architectures": ["Lfm2Model"]}, "earlier"),
        ("ministral3", {"is_causal": True}, "earlier"),
    ],
)
def test_a_model_that_attends_otherwise_than_its_module_is_refused(family, values, side, tmp_path):
    path = make_encoder(tmp_path / "m", family)
    change(path / "config.json", **values)
    assert f"{side} tokens" in refusal(path)


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("bert", {}, 512),
        ("xlm-roberta", {}, 512),  # 514 positions, of which the padding takes two
        ("xlm-roberta", {"max_position_embeddings": 100}, 98),
        ("bert", {"max_position_embeddings": 100}, 100),
    ],
)
def test_the_longest_input(family, values, expected, tmp_path):
    path = make_encoder(tmp_path / "m", family)
    change(path / "config.json", **values)
    assert facts_of(path).max_tokens == expected
    assert facts_of(path, max_model_len=1000).max_tokens == expected
    change(path / "tokenizer_config.json", model_max_length=40)
    assert facts_of(path).max_tokens == 40
    assert facts_of(path, max_model_len=60).max_tokens == 60
    change(path / "sentence_bert_config.json", max_seq_length=20)
    assert facts_of(path).max_tokens == 20


def test_an_unknown_longest_input_is_asked_for(tmp_path):
    path = make_encoder(tmp_path / "m", "modernbert")
    change(path / "config.json", max_position_embeddings=None)
    change(path / "tokenizer_config.json", model_max_length=int(1e30))
    assert "--max-model-len" in refusal(path)


def test_lengths_to_which_a_vector_may_be_cut(tmp_path):
    path = make_encoder(tmp_path / "m", "bert", matryoshka_dimensions=[16, 32, 64, 128])
    assert facts_of(path).dimensions == (16, 32)
    change(path / "config.json", matryoshka_dimensions=None, is_matryoshka=True)
    assert facts_of(path).dimensions == tuple(range(1, 64))


def test_a_default_prompt_that_is_not_there(tmp_path):
    path = make_encoder(tmp_path / "m", "bert", prompts={"query": "q: "}, default_prompt="other")
    assert "other" in refusal(path)


@pytest.mark.parametrize("name", [*SIGNS, "sentence_bert_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "3"])
def test_damaged_files_are_told(name, text, tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    (path / name).write_text(text)
    if text != '{"a": 1}' or name == "modules.json":
        refusal(path)


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_classifiers_rerank(family, tmp_path):
    facts = facts_of(make_encoder(tmp_path / "m", family, task="rerank"))
    assert (facts.task, facts.is_causal, facts.pooling, facts.has_types) == ("rerank", False, None, family == "bert")
    assert (facts.max_tokens, facts.num_dimensions) == (512, 1)


def test_classifiers_of_other_families_are_refused_by_name(tmp_path):
    path = make_encoder(tmp_path / "m", "qwen3")
    change(path / "config.json", architectures=["Qwen3ForSequenceClassification"])
    assert "qwen3" in refusal(path)


def test_causal_rerankers(tmp_path):
    path = make_encoder(tmp_path / "m", "qwen3", task="rerank")
    facts = facts_of(path)
    assert (facts.task, facts.is_causal, facts.pooling) == ("rerank", True, None)
    (path / "modules.json").unlink()
    (path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    assert facts_of(path).is_causal
    assert facts_of(checkpoint("qwen3"), task="rerank").is_causal


@pytest.mark.parametrize("given", [{"pooling": "cls"}, {"normalize": False}])
def test_rules_of_pooling_for_another_task_are_refused(given, tmp_path):
    assert "--task" in refusal(checkpoint("qwen3"), **given)
    assert "--task" in refusal(make_encoder(tmp_path / "m", "bert", task="rerank"), **given)
