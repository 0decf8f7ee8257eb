"""A copying circuit written into the starting weights, since copying does not emerge by itself in so short a run.

The hidden width starts in blocks: a constant, the token, and three notes about what stands before it. Layer 0 (gated
delta) writes the notes: the token before, the one before that, and a fading mix of earlier words. Layer 1 (attention)
looks for the place whose notes continue the present ones, and copies the token found there.
"""

import math

import torch
from torch import nn

TOKEN, BEFORE, EARLIER, MIX = slice(1, 48), slice(48, 80), slice(80, 112), slice(112, 128)
NOTE = 32  # one value head
ROTARY = 16  # the first values of an attention head turn with position: matching leaves them out
CONSTANT = 0.5
TOKEN_STD = 0.12
NOTE_SCALE = 0.05
MIX_SCALE = 0.05
MIX_WEIGHT = 1.8
COPY_SCALE = (0.4, 0.02)  # layer 1 copies, layer 3 only leans towards it
SHARP = 2.0  # norm weights (1 + w) 3 and 2: logits up to 48, enough to single out one token of many thousands
MIX_FADE = 0.7


def rotation(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, columns) with orthonormal rows or columns, whichever are fewer."""
    size = max(rows, columns)
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0][:rows, :columns]


@torch.no_grad()
def write_circuit(language_model: nn.Module, quiet_ids: list[int], *, seed: int) -> None:
    """`quiet_ids` are tokens, such as the blank, that the mix of words leaves out."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = language_model.embed_tokens.weight
    embeddings.zero_()
    tokens = torch.empty(embeddings[:, TOKEN].shape).normal_(0, TOKEN_STD, generator=generator)
    embeddings[:, TOKEN] = tokens
    embeddings[:, 0] = CONSTANT
    reader = rotation(NOTE, tokens.shape[1], generator)
    write_notes(language_model.layers[0].linear_attn, reader, tokens[quiet_ids])
    for layer, scale in zip((1, 3), COPY_SCALE, strict=True):
        write_copier(language_model.layers[layer].self_attn, reader, scale, generator)


def write_notes(layer: nn.Module, reader: torch.Tensor, quiet: torch.Tensor) -> None:
    """Value heads 0 to 2 make the notes; head 3 keeps its random start."""
    values = 2 * layer.key_dim
    inward = layer.in_proj_qkv.weight
    inward[:values].mul_(0.1)
    inward[:values, 0] = rotation(2, 1, torch.Generator().manual_seed(0)).repeat(values // 2, 1)[:, 0]
    basis = torch.linalg.qr(quiet.T)[0]
    for head, read in enumerate((reader, reader, reader - reader @ basis @ basis.T)):
        rows = slice(values + head * NOTE, values + (head + 1) * NOTE)
        inward[rows] = 0.0
        inward[rows, TOKEN] = 0.2 * read  # small, so that the activation is nearly linear
    taps = layer.conv1d.weight[:, 0]
    taps.zero_()
    taps[:, 3] = 1.0
    for head, tap in enumerate((2, 1, 2)):  # one back, two back, one back
        rows = slice(values + head * NOTE, values + (head + 1) * NOTE)
        taps[rows] = 0.0
        taps[rows, tap] = 1.0
    write_gates(layer)
    outward = layer.out_proj.weight
    outward.zero_()
    for head, (block, scale) in enumerate(((BEFORE, NOTE_SCALE), (EARLIER, NOTE_SCALE), (MIX, MIX_SCALE))):
        width = block.stop - block.start
        outward[block, head * NOTE : head * NOTE + width] = scale * torch.eye(width)


def write_gates(layer: nn.Module) -> None:
    """Heads 0 and 1 forget at once, head 2 fades, head 3 remembers long; all output gates stand open."""
    for gate in (layer.in_proj_a, layer.in_proj_b, layer.in_proj_z):
        gate.weight.mul_(0.1)
    layer.dt_bias.fill_(1.0)
    fade = -math.log(MIX_FADE / 0.8) / 1.31 + 1e-3  # softplus(1) = 1.31; the delta rule takes 0.2 more
    layer.A_log.copy_(torch.tensor([8.0, 8.0, fade, 0.02]).log())
    layer.in_proj_b.weight[:, 0] = torch.tensor([0.5, 0.5, -0.3, 0.0])  # the constant reads as about 4.6
    layer.in_proj_z.weight[:, 0] = 0.5


def write_copier(layer: nn.Module, reader: torch.Tensor, scale: float, generator: torch.Generator) -> None:
    """Both key heads match (this, before) with (before, earlier); the second adds the mix."""
    size = layer.head_dim
    queries = layer.q_proj.weight.view(4, 2 * size, -1)  # per head: query, then its output gate
    queries[:, size:].mul_(0.1)
    copied = rotation(size, TOKEN.stop - TOKEN.start, generator)
    for head in (0, 1):
        here, back, mix = (rotation(size - ROTARY, n, generator) for n in (NOTE, NOTE, MIX.stop - MIX.start))
        query, key = torch.zeros(2, size, layer.q_proj.in_features)
        query[ROTARY:, TOKEN] = here @ reader
        query[ROTARY:, BEFORE] = back
        key[ROTARY:, BEFORE] = here
        key[ROTARY:, EARLIER] = back
        if head:
            query[ROTARY:, MIX] = key[ROTARY:, MIX] = MIX_WEIGHT * mix
        queries[2 * head : 2 * head + 2, :size] = query
        layer.k_proj.weight[head * size : (head + 1) * size] = key
        value = layer.v_proj.weight[head * size : (head + 1) * size]
        value.zero_()
        value[:, TOKEN] = copied
    layer.o_proj.weight.zero_()
    layer.o_proj.weight[TOKEN] = scale * copied.T.repeat(1, 4)
    layer.q_norm.weight.fill_(SHARP)
    layer.k_norm.weight.fill_(1.0)
