"""Makes a real checkpoint in a folder, once: weights, configuration, tokenizer.

Run as a program, it prints the folder of SmolLM2-135M-Instruct, which `scripts/serve smollm2` serves.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from .gguf_content import (
    GROUP_SIZE,
    Header,
    Weights,
    llama_weights,
    packed_weights,
    read_gemma,
    read_llama,
    tokenizer_config,
    write_tokenizer,
)
from .sources import GEMMA3, SMOLLM2, Source, gguf_file, say

FOLDER = Path(os.environ.get("VLLM_MLX_REAL", Path(__file__).parents[2] / ".real"))
_DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_EMBEDDING = "model.embed_tokens"


def checkpoint(source: Source, form: str = "bfloat16", folder: Path = FOLDER) -> Path:
    """Return the folder of a checkpoint. `form`: `bfloat16`, `float32`, or the `4bit` of SmolLM2's GGUF file."""
    made = folder / (source.name if form == "bfloat16" else f"{source.name}-{form}")
    if not made.is_dir():
        file = gguf_file(source, folder)
        say(f"Converting {source.title} to {form}, once")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            new = Path(name) / made.name
            new.mkdir()
            _write(source, form, file, new)
            shutil.move(new, made)
    return made


def _write(source: Source, form: str, file: Path, folder: Path) -> None:
    if source == GEMMA3:
        header, weights = read_gemma(file, source.lock.with_name("gguf.lock"))
    else:
        header, tensors = read_llama(file)
        weights = packed_weights(header, tensors) if form == "4bit" else llama_weights(header, tensors)
    config = _llama_config(header) if source == SMOLLM2 else _gemma_config(header)
    if form == "4bit":
        kinds = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
        quantization = {**kinds, _EMBEDDING: {**kinds, "bits": 8}}
        config |= {"torch_dtype": "float16", "quantization": quantization, "quantization_config": quantization}
    else:
        config["torch_dtype"] = form
    _save(folder, weights, _DTYPES.get(form))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = tokenizer_config(header)
    if (template := header.values.get("tokenizer.chat_template")) is not None:
        tokenizer["chat_template"] = template
    write_tokenizer(header, folder)
    files = {"config.json": config, "generation_config.json": ids, "tokenizer_config.json": tokenizer}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save(folder: Path, weights: Weights, dtype: mx.Dtype | None) -> None:
    arrays = {name: array if dtype is None else array.astype(dtype) for name, array in weights}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def _config(header: Header) -> dict[str, Any]:
    ids = {name: header[f"tokenizer.ggml.{key}_token_id"] for name, key in
           (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))}  # fmt: skip
    return {
        **ids,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": header.own("embedding_length"),
        "intermediate_size": header.own("feed_forward_length"),
        "max_position_embeddings": header.own("context_length"),
        "num_attention_heads": header.own("attention.head_count"),
        "num_key_value_heads": header.own("attention.head_count_kv"),
        "num_hidden_layers": header.own("block_count"),
        "rms_norm_eps": round(float(header.own("attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": header.own("rope.freq_base"),
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": len(header["tokenizer.ggml.tokens"]),
    }


def _llama_config(header: Header) -> dict[str, Any]:
    return _config(header) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "head_dim": header.own("rope.dimension_count"),
    }


def _gemma_config(header: Header) -> dict[str, Any]:
    num_layers = header.own("block_count")
    return _config(header) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": header.own("attention.key_length"),
        "query_pre_attn_scalar": 256,
        "layer_types": ["sliding_attention" if (n + 1) % 6 else "full_attention" for n in range(num_layers)],
        "sliding_window": header.own("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": header.own("rope.local.freq_base", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


if __name__ == "__main__":
    print(checkpoint(SMOLLM2))
