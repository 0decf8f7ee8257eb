"""Seconds of a step on an Apple chip, computed from the model's shape. Nothing here was measured by this project.

A product takes as long as its weights take to be read, or as its additions take, whichever is longer. To that come the
KV that attention reads, a fixed time for every kernel, and copies. No constant belongs to one figure: those here hold
for all chips and models, and three of `device_catalogue.py` for all chips of a generation or kind. They were chosen
together, so that the published figures of `tests/scheduler/test_device_model.py` come out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MATRIX_SHARE = 0.70  # of the chip's operations in products of many tokens
VECTOR_SHARE = 0.35  # the same in products of a few tokens, whose weights are unpacked for each token
NARROW_SHARE = 0.12  # the same where no kernel takes several tokens at once
PYTHON_S = 62e-6  # building and submitting one layer's graph; hidden unless the device takes less
GROUP_PYTHON_S = 16e-6  # more of a layer with attention, for each further group of rows that attends apart
LAYER_KERNELS = 15  # of a layer with attention and an MLP
MOE_KERNELS = 23  # more of a layer that chooses experts
RECURRENT_KERNELS = 9  # more of a recurrent layer
GROUP_KERNELS = 4  # more of a layer with attention, for each further group of rows that attends apart
UNFUSED_WIDTH, FUSED_QUERIES = 256, 1024  # with matrix units, shorter chunks of so wide heads keep their scores
SCORE_PASSES = 4  # scores are written, read and written by softmax, and read
STEP_S = 0.3e-3  # a chunk is waited for: nothing overlaps its submission and its reading
KV_BYTES = 2  # of one number in the KV cache


@dataclass(frozen=True, slots=True)
class Chip:
    """Public figures of a chip with all its GPU cores."""

    name: str
    memory_bytes: int  # of the largest build
    bandwidth: float  # bytes a second
    read_share: float  # of the bandwidth that kernels reach
    dispatch_s: float  # pause between two kernels that depend on each other
    vector_flops: float  # half or single precision, the same before M5
    matrix_flops: float  # of the matrix units from M5 on, else of the same units
    tile: int  # tokens that a product of many tokens handles together; fewer cost the same
    has_wide_vectors: bool  # whether MLX has a kernel for quantised products of a few tokens at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's config, as far as it decides how long a step takes."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    bits: float  # of a weight, with its share of scales and biases
    expert_bits: float = 0.0  # 0: the same
    mlp_width: int = 0  # 0: every layer chooses experts
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0  # of the expert that every token takes
    num_recurrent: int = 0  # layers with a state of fixed size in place of KV
    recurrent_key: int = 0  # numbers of one token's key and value in such a layer
    recurrent_value: int = 0
    state_bytes: int = 0  # of one such layer and row
    num_windowed: int = 0  # attention layers that see the last `window` tokens only
    window: int = 0
    gated_query: bool = False  # twice the query projection

    @property
    def num_attention(self) -> int:
        return self.num_layers - self.num_recurrent

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers that keep every token."""
        return (self.num_attention - self.num_windowed) * self.layer_token_bytes

    @property
    def layer_token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * KV_BYTES

    def row_bytes(self, num_tokens: int) -> int:
        """State of a row: what decoding one token reads besides weights, and what a copy of the row copies."""
        windowed = self.num_windowed * min(num_tokens, self.window) * self.layer_token_bytes
        return num_tokens * self.token_bytes + windowed + self.num_recurrent * self.state_bytes

    @property
    def shared_weights(self) -> int:
        """Weights that every token uses, without the head."""
        query = self.hidden * self.num_heads * self.head_dim
        attention = query * (3 if self.gated_query else 2) + 2 * self.hidden * self.num_kv_heads * self.head_dim
        recurrent = self.hidden * (2 * self.recurrent_key + 3 * self.recurrent_value)
        mlp = 3 * self.hidden * (self.shared_width if self.num_experts else self.mlp_width)
        return self.num_attention * attention + self.num_recurrent * recurrent + self.num_layers * mlp

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in all layers."""
        return 3 * self.hidden * self.expert_width * self.num_layers if self.num_experts else 0

    def experts_touched(self, num_tokens: int) -> float:
        """Experts of a layer that so many tokens choose, in expectation, if they choose independently."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)

    @property
    def weights_bytes(self) -> float:
        """All weights, the head once."""
        experts = self.num_experts * self.expert_weights * (self.expert_bits or self.bits)
        return ((self.shared_weights + self.head_weights) * self.bits + experts) / 8

    @property
    def num_kernels(self) -> int:
        extra = self.num_layers * MOE_KERNELS if self.num_experts else 0
        return self.num_layers * LAYER_KERNELS + extra + self.num_recurrent * RECURRENT_KERNELS


@dataclass(frozen=True, slots=True)
class Device:
    """One chip that runs one model."""

    chip: Chip
    shape: Shape

    def read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.chip.bandwidth * self.chip.read_share)

    def copy_s(self, num_bytes: float) -> float:
        """Bytes are read and written."""
        return self.read_s(2 * num_bytes)

    def decode_s(self, forwards: Iterable[Sequence[Sequence[int]]], num_drafts: int = 0) -> float:
        """A step of decoding: each forward pass has groups of rows that attend together, each row its length.

        `num_drafts`: tokens of all rows of a pass, beyond one a row. They attend with their row, which is read once.
        """
        passes = [tuple(forward) for forward in forwards]
        further = sum(len(groups) - 1 for groups in passes) * self.shape.num_attention
        python_s = len(passes) * self.python_s + further * GROUP_PYTHON_S
        return max(sum(self._forward_s(groups, num_drafts) for groups in passes), python_s)

    def chunk_s(self, num_tokens: int, start: int = 0) -> float:
        """A chunk of a prompt after `start` tokens. It needs no logits."""
        shape = self.shape
        pairs = num_tokens * (start + num_tokens / 2)
        windowed = num_tokens * min(shape.window, start + num_tokens / 2)
        seen = (shape.num_attention - shape.num_windowed) * pairs + shape.num_windowed * windowed
        attention_s = 4 * shape.num_heads * shape.head_dim * seen / (self.chip.matrix_flops * MATRIX_SHARE)
        if self.chip.tile > 32 and shape.head_dim == UNFUSED_WIDTH and num_tokens < FUSED_QUERIES:
            scores = shape.num_attention * shape.num_heads * num_tokens * (start + num_tokens)
            attention_s += self.read_s(SCORE_PASSES * KV_BYTES * scores)
        device_s = self._products_s(num_tokens, num_logits=0) + attention_s + shape.num_kernels * self.chip.dispatch_s
        return max(device_s + self.read_s(shape.row_bytes(start)), self.python_s) + STEP_S

    @property
    def python_s(self) -> float:
        return self.shape.num_layers * PYTHON_S

    def _forward_s(self, groups: Sequence[Sequence[int]], num_drafts: int) -> float:
        num_tokens = sum(map(len, groups)) + num_drafts
        kv_s = self.read_s(sum(self.shape.row_bytes(length) for group in groups for length in group))
        num_kernels = self.shape.num_kernels + (len(groups) - 1) * GROUP_KERNELS * self.shape.num_attention
        return self._products_s(num_tokens, num_logits=num_tokens) + kv_s + num_kernels * self.chip.dispatch_s

    def _products_s(self, num_tokens: int, *, num_logits: int) -> float:
        shape = self.shape
        seconds = self._product_s(num_tokens, shape.shared_weights, shape.bits)
        if num_logits:
            seconds += self._product_s(num_logits, shape.head_weights, shape.bits)
        if shape.num_experts:
            touched = shape.experts_touched(num_tokens)
            tokens = num_tokens * shape.experts_per_token / touched
            bits = shape.expert_bits or shape.bits
            seconds += self._product_s(tokens, touched * shape.expert_weights, bits)
        return seconds

    def _product_s(self, num_tokens: float, num_weights: float, bits: float) -> float:
        """The product of so many tokens with weights, by the faster kernel of two."""
        chip, read_s = self.chip, self.read_s(num_weights * bits / 8)
        is_wide = chip.has_wide_vectors or bits > 8.5
        vector_share = VECTOR_SHARE if is_wide or num_tokens == 1 else NARROW_SHARE
        vector_s = 2 * num_tokens * num_weights / (chip.vector_flops * vector_share)
        tiled = math.ceil(num_tokens / chip.tile) * chip.tile
        matrix_s = 2 * tiled * num_weights / (chip.matrix_flops * MATRIX_SHARE)
        return max(read_s, min(vector_s, matrix_s))
