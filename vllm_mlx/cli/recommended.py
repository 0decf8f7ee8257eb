"""Checkpoints that coding agents work with, and which of them a budget of memory holds. It loads and asks nothing.

The sizes are those of the files on Hugging Face in October 2026; what fits is computed, not measured.
"""

from dataclasses import dataclass

AGENT_CONTEXT = 40_000  # tokens: what coding agents need for real work
_SHARE = 16  # 1/16 of the budget for a chunk's attention scores and for images; see engine/loading.py
_COPIED_BYTES = 256 << 20  # what is copied in one evaluation
_NUM_SHOWN = 3
_SMALL_MAC = 32 << 30  # bytes: up to here Metal recommends two thirds of a Mac's memory, beyond it three quarters


@dataclass(frozen=True, slots=True)
class Recommended:
    """`num_layers` of full attention keep keys and values in 16 bits; the state of the other layers does not grow."""

    name: str
    weights_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def needed_bytes(self, budget_bytes: int) -> int:
        """The part of the budget that one conversation of `AGENT_CONTEXT` tokens needs, weights included."""
        overhead = budget_bytes // _SHARE + _COPIED_BYTES
        return self.weights_bytes + AGENT_CONTEXT * self.bytes_per_token + overhead


RECOMMENDED = (  # by size
    Recommended("mlx-community/Qwen3.5-4B-MLX-4bit", 3_030_000_000, 8, 4, 256),
    Recommended("mlx-community/Qwen3.5-9B-MLX-4bit", 5_950_000_000, 8, 4, 256),
    Recommended("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000, 12, 8, 64),
    Recommended("mlx-community/Qwen3.8-27B-4bit", 16_100_000_000, 16, 4, 256),
    Recommended("mlx-community/Qwen3.6-35B-A3B-4bit", 20_400_000_000, 10, 2, 256),
    Recommended("mlx-community/Qwen3.6-35B-A3B-6bit", 29_100_000_000, 10, 2, 256),
    Recommended("mlx-community/Qwen3.8-27B-8bit", 29_500_000_000, 16, 4, 256),
    Recommended("mlx-community/Qwen3.6-35B-A3B-8bit", 37_700_000_000, 10, 2, 256),
    Recommended("mlx-community/Qwen3-Coder-Next-4bit", 44_800_000_000, 12, 2, 256),
    Recommended("mlx-community/gpt-oss-120b-MXFP4-Q8", 63_400_000_000, 18, 8, 64),
    Recommended("mlx-community/Qwen3.5-122B-A10B-4bit", 69_600_000_000, 12, 2, 256),
    Recommended("mlx-community/Qwen3.5-122B-A10B-8bit", 130_000_000_000, 12, 2, 256),
    Recommended("mlx-community/Qwen3.5-397B-A17B-4bit", 223_900_000_000, 15, 2, 256),
)


def fitting(budget_bytes: int) -> tuple[Recommended, ...]:
    """The largest checkpoints that fit, with a conversation of `AGENT_CONTEXT` tokens; the largest comes first."""
    found = [one for one in reversed(RECOMMENDED) if one.needed_bytes(budget_bytes) <= budget_bytes]
    return tuple(found[:_NUM_SHOWN])


def assumed_recommended_bytes(memory_bytes: int) -> int:
    """What Metal recommends for one process on a Mac with that much memory; a Mac itself says it exactly."""
    return memory_bytes * 2 // 3 if memory_bytes <= _SMALL_MAC else memory_bytes * 3 // 4
