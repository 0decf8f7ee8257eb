"""Tiny random checkpoints of embedders and rerankers, with the files of sentence-transformers, loadable like real ones.

Their tokenizers ask for padding on the left and for cutting at 16 tokens: who follows that gets other vectors.
"""

import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .checkpoints import convert, random_weight, write_checkpoint
from .tokenizers import CORPUS

FAMILIES = ("bert", "modernbert", "xlm-roberta", "qwen3", "gemma3_text", "lfm2", "ministral3", "llama_bidirec")
CLASSIFIERS = ("bert", "modernbert", "xlm-roberta")
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>")  # their ids are 0, 1, 2
VOCAB_SIZE = 384
NUM_TOKENS = 360  # of the tokenizer
HIDDEN_SIZE = 64
MAX_POSITIONS = 512

_BERT: dict[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": 1}
_DECODER: dict[str, Any] = {
    "hidden_act": "silu", "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
# Family → config.json. The names are config.json's model_type.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "architectures": ["BertModel"], "type_vocab_size": 2},
    "modernbert": {
        "architectures": ["ModernBertModel"], "hidden_activation": "gelu", "global_rope_theta": 1600.0,
        "local_rope_theta": 100.0, "global_attn_every_n_layers": 3, "local_attention": 16, "norm_eps": 1e-05,
        "pad_token_id": 1,
    },
    "xlm-roberta": {
        **_BERT, "architectures": ["XLMRobertaModel"], "type_vocab_size": 1,
        "max_position_embeddings": MAX_POSITIONS + 2,
    },
    "qwen3": {**_DECODER, "architectures": ["Qwen3ForCausalLM"]},
    "gemma3_text": {
        **_DECODER, "architectures": ["Gemma3TextModel"], "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16, "rope_theta": 1000.0, "rope_local_base_freq": 100.0, "sliding_window": 32,
        "sliding_window_pattern": 3, "use_bidirectional_attention": True,
    },
    "lfm2": {
        **_DECODER, "architectures": ["Lfm2BidirectionalModel"], "norm_eps": 1e-05, "conv_bias": False,
        "conv_L_cache": 3, "block_dim": HIDDEN_SIZE, "block_ff_dim": 128, "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "ministral3": {
        **_DECODER, "architectures": ["Ministral3Model"], "is_causal": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama_bidirec": {**_DECODER, "architectures": ["LlamaBidirectionalModel"]},
}  # fmt: skip
_MODULES = {"qwen3": "qwen3_embedding", "gemma3_text": "gemma3_embedding", "lfm2": "lfm2_embedding",
            "ministral3": "ministral3_embedding", "xlm-roberta": "xlm_roberta"}  # fmt: skip
_PREFIXES = {"bert": "bert.", "modernbert": "model.", "xlm-roberta": "roberta."}  # in front of a classifier's encoder
_HEADS = ("classifier.", "head.")
_POOLING_KEYS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
_TEMPLATES = {  # what the tokenizer puts around one text, and around two
    "xlm-roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "qwen3": ("$A </s>", None),
    "lfm2": ("<s> $A", None),
}
Layers = tuple[tuple[int, str], ...]  # of dense layers: the number of outputs, and the activation of torch


def make_encoder(
    path: Path,
    family: str,
    *,
    task: str = "embedding",
    pooling: str | None = "mean",
    normalize: bool = True,
    dense: Layers = (),
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    max_tokens: int | None = None,
    dtype: str = "float32",
    bits: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A checkpoint in the folder `path`, the same for the same arguments. `config` changes config.json.

    With `pooling` None, no file says how it pools. `max_tokens` is sentence-transformers' max_seq_length. With the task
    "rerank", bert, modernbert and xlm-roberta are classifiers, and qwen3 is a causal reranker. gemma3_text always has
    its two dense layers.
    """
    path.mkdir(parents=True, exist_ok=True)
    if task == "rerank" and family not in CLASSIFIERS:
        return _make_causal(path, family, seed, dtype)
    settings = {
        "model_type": family, "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": MAX_POSITIONS,
        "torch_dtype": dtype, **CONFIGS[family], **config,
    }  # fmt: skip
    if task == "rerank":
        name = settings["architectures"][0].replace("Model", "ForSequenceClassification")
        settings |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        settings.setdefault("classifier_pooling", "cls")
    _write_tokenizer(path, family)
    _write_model(path, settings, task, seed, dtype, bits)
    if task == "embedding" and pooling is not None:
        if family == "gemma3_text":
            dense = ((4 * HIDDEN_SIZE, "Identity"), (HIDDEN_SIZE, "Identity"))
        _write_modules(path, pooling, normalize=normalize, dense=dense, has_bias=family != "gemma3_text", seed=seed)
        _write(path / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
        named = {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
        _write(path / "config_sentence_transformers.json", named)
    return path


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=1))


@lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


def _write_tokenizer(path: Path, family: str) -> None:
    tokenizer = Tokenizer.from_str(_trained())
    single, pair = _TEMPLATES.get(family, ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"))
    ids = [(text, SPECIAL_TOKENS.index(text)) for text in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(direction="left", pad_id=1, pad_token="<pad>", length=24)
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", "model_max_length": MAX_POSITIONS}
    more["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"][:: 1 if family == "bert" else 2]
    _write(path / "tokenizer_config.json", {**tokens, **more, "clean_up_tokenization_spaces": False})


def _write_model(path: Path, config: dict[str, Any], task: str, seed: int, dtype: str, bits: int | None) -> None:
    """Write config and weights, with the weights' names and shapes that transformers gives them."""
    family = config["model_type"]
    library = importlib.import_module(f"mlx_vlm.models.{_MODULES.get(family, family)}")
    name = "SequenceClassificationModel" if task == "rerank" else "Model"
    rope = {"rope_global_base_freq": config["rope_theta"]} if family == "gemma3_text" else {}
    module: nn.Module = getattr(library, name)(library.ModelConfig.from_dict({**config, **rope, "num_labels": 1}))
    mx.random.seed(seed)
    drawn = [(name, random_weight(name, weight)) for name, weight in tree_flatten(module.parameters())]
    module.load_weights(drawn)
    _write(path / "config.json", convert(module, config, dtype, bits))
    weights: dict[str, mx.array] = {}
    for name, weight in tree_flatten(module.parameters()):
        if name.startswith("dense.") and bits is None:  # conversions for MLX keep them with the other weights
            folder = path / ("2_Dense" if name.startswith("dense.0") else "3_Dense")
            folder.mkdir(exist_ok=True)
            mx.save_safetensors(str(folder / "model.safetensors"), {"linear.weight": weight}, {"format": "pt"})
            continue
        if task == "rerank":
            name = name if name.startswith(_HEADS) else _PREFIXES[family] + name
        elif family != "llama_bidirec":
            name = name.removeprefix("model.")
        weights[name] = weight.transpose(0, 2, 1) if name.endswith("conv.conv.weight") else weight
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})


def _write_modules(path: Path, pooling: str, *, normalize: bool, dense: Layers, has_bias: bool, seed: int) -> None:
    steps = [("", "Transformer"), ("1_Pooling", "Pooling")]
    steps += [(f"{number}_Dense", "Dense") for number in range(2, 2 + len(dense))]
    steps += [(f"{len(steps)}_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(steps)
    ]
    _write(path / "modules.json", modules)
    modes = {f"pooling_mode_{key}": name == pooling for name, key in _POOLING_KEYS.items()}
    modes |= {"pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False}
    _write(path / "1_Pooling/config.json", {"word_embedding_dimension": HIDDEN_SIZE, **modes, "include_prompt": True})
    num_inputs = HIDDEN_SIZE
    for number, (num_outputs, activation) in enumerate(dense, start=2):
        place = "linear" if activation == "Identity" else "activation"
        layer = {
            "in_features": num_inputs, "out_features": num_outputs, "bias": has_bias,
            "activation_function": f"torch.nn.modules.{place}.{activation}",
        }  # fmt: skip
        _write(path / f"{number}_Dense/config.json", layer)
        if has_bias:
            mx.random.seed(seed + number)
            weight = mx.random.normal((num_outputs, num_inputs)) / num_inputs**0.5
            arrays = {"linear.weight": weight, "linear.bias": 0.1 * mx.random.normal((num_outputs,))}
            mx.save_safetensors(str(path / f"{number}_Dense/model.safetensors"), arrays, metadata={"format": "pt"})
        num_inputs = num_outputs


def _make_causal(path: Path, family: str, seed: int, dtype: str) -> Path:
    """A chat checkpoint that scores by the logits of two tokens, as sentence-transformers saves it."""
    write_checkpoint(path, family, seed=seed, dtype=dtype, architectures=["Qwen3ForCausalLM"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    names = {"true_token_id": "1", "false_token_id": "0"}
    kinds = (
        ("", "base.modules.transformer.Transformer"),
        ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore"),
    )
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.{kind}"}
        for index, (folder, kind) in enumerate(kinds)
    ]
    _write(path / "modules.json", modules)
    _write(path / "1_LogitScore/config.json", {key: tokenizer.token_to_id(text) for key, text in names.items()})
    _write(path / "sentence_bert_config.json", {"transformer_task": "text-generation", "max_seq_length": None})
    return path
