"""Tiny random checkpoints of the text architectures this server promises, loadable like real ones. Knows no test.

Weights are fp32, so that cold, cached, batched and chunked runs must agree token for token, and drawn so that greedy
replies wander instead of repeating one token.
"""

import atexit
import fcntl
import hashlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .mtp_heads import with_head
from .tokenizers import TEMPLATES

LICENSE = Path(__file__).parents[2] / "LICENSE"  # enough English to fill the vocabulary
VOCAB_SIZE = 1024  # of the models
NUM_TOKENS = 1000  # of the tokenizer: as in many real checkpoints, the last ids have no text
MAX_POSITIONS = 65536
QUANTIZED_GROUP = 64  # weights that share a scale, as in most quantised checkpoints

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
# Qwen's tokenizers declare these special=False: decoding with skip_special_tokens keeps them in the text.
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    "hello world, this is a test of the tokenizer. ",
    "user assistant system tool You are a helpful assistant.\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} ',
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n",
    "What is in this file? Read it and say what it does, in detail. ",
    "def main():\n    return 1 + 2\n",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 100 2024 3.14 ",
    "été 東京 🙂 ñ ",
)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False,
}  # fmt: skip
GATED_DELTA: dict[str, Any] = {
    "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    # Metal's kernel takes states in multiples of 32 only, and does not say so
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_expand": 2,
}  # fmt: skip
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Architecture → config.json, on top of BASE. The names are config.json's model_type.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"head_dim": 16},
    "qwen3_next": {
        **GATED_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "norm_topk_prob": True, "partial_rotary_factor": 0.25,
    },
    "qwen3_5": {
        **GATED_DELTA,
        "rope_parameters": {
            "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
    },
    "nemotron_h": {
        "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "head_dim": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 32, "conv_kernel": 4,
        "n_groups": 2, "layer_norm_epsilon": 1e-05, "hybrid_override_pattern": ["M", "-", "M", "*", "M", "-"],
    },
    "falcon_h1": {**MAMBA, "num_hidden_layers": 3, "head_dim": 16, "mamba_d_ssm": 128, "lm_head_multiplier": 1.0},
    "granitemoehybrid": {
        **MAMBA, **MOE, "intermediate_size": 64, "shared_intermediate_size": 64, "attention_bias": False,
        "mamba_proj_bias": False, "mamba_conv_bias": True, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "position_embedding_type": "nope",
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 3, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1,
    },
    "gemma3_text": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "rope_local_base_freq": 1000.0, "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {
        **MOE, "intermediate_size": 64, "head_dim": 16, "sliding_window": 24, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
ARCHITECTURES = tuple(CONFIGS)
OWN_ATTENTION: dict[str, dict[str, Any]] = {"gemma2": {"head_dim": 16}}  # not MLX's function
# Architectures some of whose layers have no rotary embedding, so that they never read a row's length.
PARTLY_ROTARY: dict[str, dict[str, Any]] = {
    "smollm3": {"head_dim": 16},
    "exaone4": {
        "head_dim": 16, "rope_scaling": {"rope_type": "default"}, "sliding_window": 24,
        "sliding_window_pattern": "LLLG",
    },
    "cohere2": {"head_dim": 16, "layer_norm_eps": 1e-05, "sliding_window": 24, "sliding_window_pattern": 4},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 128, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
}  # fmt: skip
# Latent attention: keys and values are one vector a token, and positional keys another.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 24, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: dict[str, dict[str, Any]] = {"deepseek_v3": _LATENT, "glm4_moe_lite": _LATENT}  # Kimi K2 is a deepseek_v3
# Architectures with cache classes that cannot be batched, or layers that read others' keys and values.
OWN_STATE: dict[str, dict[str, Any]] = {
    "llama4": {
        "head_dim": 16, "attention_bias": False, "attention_chunk_size": 24, "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "rope_scaling": None,
        "use_qk_norm": True,
    },
    "afm7": {
        "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
    "deepseek_v41": {
        "head_dim": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
        "compress_ratios": [0, 4, 4, 4], "kv_source_layer_ids": [1], "index_source_layer_ids": [1], "index_n_heads": 2,
        "index_head_dim": 32, "index_topk": 8,
    },
}  # fmt: skip
ALSO_CUT = {"qwen2": {}, "qwen3_moe": {**CONFIGS["qwen3_next"], "head_dim": 16}}  # over ranks, by mlx-lm
_TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "llama4": "llama4_text"}  # config.json has the text's settings apart
VISION = "vision:"  # before the name of a family of `vision_checkpoints`
LANGUAGE = "language:"  # before the name of a family of `language_families`


@lru_cache
def train_tokenizer() -> Tokenizer:
    """A byte-level BPE, then the special tokens and markers: NUM_TOKENS in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_merged = NUM_TOKENS - len(SPECIAL_TOKENS) - len(MARKER_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=num_merged, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*CORPUS * 4, LICENSE.read_text()], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKER_TOKENS])
    return tokenizer


def tokenizer_config(*, is_gemma: bool) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>" if is_gemma else None,
        "eos_token": "<eos>" if is_gemma else "<|im_end|>",
        "pad_token": "<pad>" if is_gemma else "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }


def write_tokenizer(folder: Path, architecture: str) -> int:
    """Writes tokenizer and chat template; returns the id that ends a turn."""
    is_gemma = architecture.startswith("gemma")
    template = "gemma" if is_gemma else "qwen3_5" if architecture == "qwen3_5" else "qwen3"
    config = tokenizer_config(is_gemma=is_gemma)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return int(tokenizer.token_to_id("<end_of_turn>" if is_gemma else "<|im_end|>"))


def model_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """config.json; `overrides` go where the architecture keeps its text settings."""
    known = {**CONFIGS, **PARTLY_ROTARY, **LATENT, **OWN_ATTENTION, **OWN_STATE, **ALSO_CUT}
    config = {**BASE, **known[architecture], **overrides}
    if architecture in _TEXT_PARTS:
        return {"model_type": architecture, "text_config": {"model_type": _TEXT_PARTS[architecture], **config}}
    return {"model_type": architecture, **config}


def random_weight(name: str, weight: mx.array) -> mx.array:
    """Values under which all layers matter: plain initialisation decodes to one token for ever."""
    if "embed_tokens" in name or "embeddings" in name:
        return mx.random.normal(weight.shape)
    if name.endswith("dt_bias"):
        return mx.random.uniform(-3.0, 0.0, weight.shape)
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.02, 1.0, weight.shape))  # states that remember more than the last tokens
    if name.endswith("sinks"):
        return mx.random.normal(weight.shape)
    if name.endswith("bias"):
        return 0.1 * mx.random.normal(weight.shape)
    if weight.ndim >= 2 and name.endswith(("weight", "gate_proj", "up_proj", "down_proj")):
        return mx.random.normal(weight.shape) * (1.5 / weight.shape[-1] ** 0.5)
    if weight.ndim == 1 and "norm" in name:
        return weight + 0.1 * mx.random.normal(weight.shape)
    return weight


def randomise(model: nn.Module, seed: int) -> None:
    mx.random.seed(seed)
    weights = [(name, random_weight(name, weight)) for name, weight in tree_flatten(model.parameters())]
    model.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights])
    mx.eval(model.parameters())


def convert(model: nn.Module, config: dict[str, Any], dtype: str, bits: int | None = None) -> dict[str, Any]:
    """Converts the weights as mlx-lm's converter does. Returns config.json."""
    may_convert = getattr(model, "cast_predicate", lambda _: True)
    weights = [(name, weight) for name, weight in tree_flatten(model.parameters()) if may_convert(name)]
    model.load_weights([(name, weight.astype(getattr(mx, dtype))) for name, weight in weights], strict=False)
    if bits is None:
        return config
    converted: dict[str, Any] = quantize_model(model, config, group_size=QUANTIZED_GROUP, bits=bits)[1]
    return converted


def write_checkpoint(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    bits: int | None = None,
    mtp: bool = False,
    **overrides: Any,
) -> Path:
    """A checkpoint in `folder`, the same for the same arguments. `overrides` change config.json.

    `dtype` is the name of a type of mlx; `bits` quantises the weights; with `mtp`, it has an MTP head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    eos_token_id = write_tokenizer(folder, architecture)
    config = {**model_config(architecture, **overrides), "eos_token_id": [eos_token_id], "torch_dtype": dtype}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos_token_id], "do_sample": False}))
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    randomise(model, seed)
    head = with_head(model, config["text_config"], seed) if mtp else {}
    config = convert(model, config, dtype, bits)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights | head, metadata={"format": "mlx"})
    return folder


class CheckpointStore:
    """Makes each checkpoint once, under one folder that several processes may share."""

    def __init__(self, root: Path):
        self._root = root
        self._made: dict[str, Path] = {}

    def __call__(self, architecture: str, **options: Any) -> Path:
        key = "-".join([architecture, *(f"{name}={options[name]}" for name in sorted(options))])
        if key not in self._made:
            self._made[key] = self._make(key, architecture, options)
        return self._made[key]

    def _make(self, key: str, architecture: str, options: dict[str, Any]) -> Path:
        name = architecture.removeprefix(VISION).removeprefix(LANGUAGE)
        folder = self._root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        self._root.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _writer(architecture)(folder.with_suffix(".unfinished"), name, **options).rename(folder)
        return folder


def _writer(architecture: str) -> Callable[..., Path]:
    if not architecture.startswith((VISION, LANGUAGE)):
        return write_checkpoint
    from .vision_checkpoints import write_language_checkpoint, write_vision_checkpoint

    return write_vision_checkpoint if architecture.startswith(VISION) else write_language_checkpoint


@lru_cache
def _process_store() -> CheckpointStore:
    root = tempfile.mkdtemp(prefix="vllm-mlx-checkpoints-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return CheckpointStore(Path(root))


def checkpoint(architecture: str, **options: Any) -> Path:
    """A checkpoint for code outside pytest's fixtures; gone when the process ends. Options as `write_checkpoint`."""
    return _process_store()(architecture, **options)
