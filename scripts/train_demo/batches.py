"""Examples to tensors, and the model's pass over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .encode import IGNORED, Example


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, labels: (rows, tokens), padded on the right; positions: (3, rows, tokens)."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    pixels: torch.Tensor | None
    grids: torch.Tensor | None


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Right padding needs no mask: everything in the model is causal, and padded labels are ignored."""
    rows, length = len(examples), max(len(e.ids) for e in examples)
    ids = torch.full((rows, length), pad_id)
    labels = torch.full((rows, length), IGNORED)
    positions = torch.zeros(3, rows, length, dtype=torch.long)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        labels[row, :size] = torch.tensor(example.labels)
        positions[:, row, :size] = torch.tensor(example.positions).T
    pixels = [p for e in examples for p in e.pixels]
    grids = [g for e in examples for g in e.grids]
    if not pixels:
        return Batch(ids, labels, positions, None, None)
    return Batch(ids, labels, positions, torch.from_numpy(np.concatenate(pixels)), torch.tensor(grids))


def pack(examples: list[Example], max_tokens: int) -> list[list[Example]]:
    """Yield groups of similar length whose padded size stays within `max_tokens` where one example does."""
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.ids)):
        if groups and (len(groups[-1]) + 1) * len(example.ids) <= max_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def hidden_states(model: nn.Module, batch: Batch) -> torch.Tensor:
    """(rows, tokens, hidden) before the output projection."""
    language_model, tower = model.model.language_model, model.model.visual
    embeddings = language_model.embed_tokens(batch.ids)
    if batch.pixels is not None:
        features = tower(batch.pixels, grid_thw=batch.grids).pooler_output
        places = (batch.ids == model.config.image_token_id)[..., None].expand_as(embeddings)
        embeddings = embeddings.masked_scatter(places, features.to(embeddings.dtype))
    output = language_model(inputs_embeds=embeddings, position_ids=batch.positions, use_cache=False)
    return output.last_hidden_state


def learned_places(batch: Batch) -> torch.Tensor:
    """(rows, tokens - 1): after which tokens the next one is learned."""
    return batch.labels[:, 1:] != IGNORED


def learned_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (learned tokens, vocab) and the tokens they should give."""
    learned = learned_places(batch)
    hidden = hidden_states(model, batch)[:, :-1]
    return hidden[learned] @ model.model.language_model.embed_tokens.weight.T, batch.labels[:, 1:][learned]
