"""Facts about models that their `model_type` and config.json tell before the load. The module is pure.

`cache/layers.py` knows models by the classes of their caches, and `media/renderers.py` knows which image processors it
replaces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core.errors import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """Facts about one `model_type`. The defaults are those of an unknown type."""

    no_batch_in: Literal["mlx-lm", "mlx-vlm"] | None = None  # the library that computes rows in a batch wrong
    text_by_mlx_lm: bool = False  # mlx-lm's language model runs on the weights of mlx-vlm's
    has_ssm_kernel: bool = False
    images_shown: bool = False  # images were shown to be right token by token, so a failed probe only warns
    records_states: bool = False  # mlx-vlm keeps the recurrent state behind each token of a pass with drafts
    no_compile: bool = False  # mlx-vlm compiles code for any length that depends on the first length
    no_grid: bool = False  # mlx-vlm places the tokens of images as it places those of text
    image_fault: str | None = None  # the text of a warning, if mlx-vlm reads images incorrectly


_SHOWN = TypeFacts(images_shown=True)
_HYBRID = TypeFacts(images_shown=True, records_states=True)
_SSM = TypeFacts(has_ssm_kernel=True)
_UNKNOWN = TypeFacts()
_TYPES = {
    "afm7": TypeFacts(no_batch_in="mlx-lm"),  # turns queries by the width of a batch, padding included
    "mistral4": TypeFacts(no_batch_in="mlx-vlm"),  # scales a batch by the position of its first row
    "ministral3": TypeFacts(text_by_mlx_lm=True),
    "hy_v4": TypeFacts(no_compile=True),
    "minimax_m3": TypeFacts(no_grid=True),
    "minimax_m3_vl": TypeFacts(no_grid=True),
    "gemma3": TypeFacts(
        images_shown=True,
        image_fault="Gemma 3 was trained to read an image in both directions. mlx-vlm, and so this server, reads it in "
        "one: what is said of images may be less exact",
    ),
    "gemma4": _SHOWN,
    "mistral3": _SHOWN,
    "pixtral": _SHOWN,
    "qwen2_vl": _SHOWN,
    "qwen2_5_vl": _SHOWN,
    "qwen3_vl": _SHOWN,
    "qwen3_vl_moe": _SHOWN,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "falcon_h1": _SSM,
    "granitemoehybrid": _SSM,
    "mamba2": _SSM,
    "nemotron_h": _SSM,
    "plamo2": _SSM,
    "plamo2vl": _SSM,
}
# Read in MLX's kernels, and verified on no Mac: the next one, _MOST_ROWS and _TILE.
_SIMD = 32  # threads among which a kernel divides the state of a head, without a remainder
_SSM_WIDTHS = ("mamba_d_state", "ssm_state_size", "state_size")
_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
_MOST_ROWS = 32_767  # rows of a product of experts whose bounds fit the kernel's 16-bit numbers
_TILE = 64  # rows


def facts_of(model_type: str | None) -> TypeFacts:
    return _TYPES.get(model_type or "", _UNKNOWN)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    text = config.get("text_config")
    return text if text and isinstance(text, Mapping) else config


def kernel_fault(config: Mapping[str, Any], *, by_mlx_vlm: bool, in_mlx_lm: bool = True) -> str | None:
    """Return the reason why MLX's Metal kernels compute this model wrong, without an error, and a remedy.

    `in_mlx_lm`: mlx-lm has a module for the text.

    Returns None if they compute it right, as the CPU does for all models. Sources: mlx_lm/models/ssm.py,
    mlx_vlm/models/qwen3_5/gated_delta.py.
    """
    text = text_config(config)
    if facts_of(str(text.get("model_type")).removesuffix("_text")).has_ssm_kernel:
        width = next((text[key] for key in _SSM_WIDTHS if isinstance(text.get(key), int)), _SIMD)
        if width % _SIMD:
            return (
                f"the state of its recurrent layers is {width} wide. MLX's kernel takes multiples of {_SIMD} and would "
                "ignore other states. Use another checkpoint."
            )
    width = text.get("linear_key_head_dim")
    if by_mlx_vlm and isinstance(width, int) and width % _SIMD:
        advice = f"Serve it with {setting('text_only')}: mlx-lm uses no kernel then."
        return (
            f"the heads of its linear attention are {width} wide. mlx-vlm's kernel takes multiples of {_SIMD} and "
            f"would ignore a part of the state. {advice if in_mlx_lm else 'Use another checkpoint.'}"
        )
    return None


def records_states(config: Mapping[str, Any]) -> bool:
    """Return whether mlx-vlm computes this text model right, and records the states that drafts of it need."""
    return facts_of(str(config["model_type"])).records_states and kernel_fault(config, by_mlx_vlm=True) is None


def longest_chunk(config: Mapping[str, Any]) -> int | None:
    """Return tokens of the longest prefill chunk that the kernel for a mixture of experts computes right on an M5.

    Its rows are the chunk's tokens, once for each expert of a token. Returns None if the model has no experts. Source:
    backend/metal/kernels/quantized_nax.h in MLX.
    """
    text = text_config(config)
    experts = next((text[key] for key in _EXPERTS if isinstance(text.get(key), int) and text[key] > 0), None)
    return None if experts is None else _MOST_ROWS // experts // _TILE * _TILE
