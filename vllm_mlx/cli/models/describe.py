"""A checkpoint's folder read without loading it: kind, size, precision, context, formats. No mlx, no network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...formats.detect import detect_formats

_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    architecture: str
    kind: str  # text, vision
    weights_bytes: int
    precision: str
    context: int | None  # tokens; None: it does not say
    bytes_per_token: int  # of attention state, where every layer keeps it: an upper bound
    reasoning: str | None
    tools: str | None
    has_template: bool


def describe(folder: Path) -> Description:
    """Raises ConfigError for a folder that holds no checkpoint."""
    config = _json(folder / "config.json")
    if not config.get("model_type"):
        raise ConfigError(f"{folder} is not a checkpoint: it has no config.json that names its architecture.")
    weights = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder} holds no model*.safetensors: its weights are missing, or not whole.")
    text = config.get("text_config") or config
    template = _template(folder)
    reasoning, tools = detect_formats(template, _added_tokens(folder))
    return Description(
        architecture=str(config["model_type"]),
        kind="vision" if config.get("vision_config") else "text",
        weights_bytes=weights,
        precision=_precision(config, text),
        context=next((int(text[key]) for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None),
        bytes_per_token=_bytes_per_token(text),
        reasoning=reasoning,
        tools=tools,
        has_template=template is not None,
    )


def _precision(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    if bits := quantization.get("bits"):
        return f"{bits} bits"
    dtypes = [each.get(key) for each in (config, text) for key in ("dtype", "torch_dtype")]
    return str(next((dtype for dtype in dtypes if dtype), "?"))


def _bytes_per_token(text: Mapping[str, Any]) -> int:
    """Keys and values in 16 bits, of the layers that attend."""
    num_layers, num_heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not isinstance(num_layers, int) or not isinstance(num_heads, int) or not num_heads:
        return 0
    if kinds := text.get("layer_types"):
        num_layers = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // num_heads
    return int(2 * 2 * num_layers * (text.get("num_key_value_heads") or num_heads) * head_dim)


def _template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _added_tokens(folder: Path) -> set[str]:
    """Formats are told by tokens that were added; the whole vocabulary would take a second to read."""
    added = _json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {str(token.get("content")) for token in added.values() if isinstance(token, dict)}


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
