"""The first stage: the vision tower alone learns colour and shape through a throw-away readout."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .optimiser import Optimiser
from .pictures import COLORS, SHAPES, Picture, patches, picture

BATCH = 32
COLOR_NAMES = list(COLORS)


def features(tower: nn.Module, pictures: list[Picture]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return merged image tokens (tokens, hidden) and the number of tokens of each picture."""
    pixels, grids = zip(*(patches(p.image) for p in pictures), strict=True)
    grid = torch.tensor(grids)
    merged = tower(torch.from_numpy(np.concatenate(pixels)), grid_thw=grid).pooler_output
    return merged, grid[:, 1] * grid[:, 2] // 4


def readout(tower: nn.Module, head: nn.Linear, pictures: list[Picture]) -> torch.Tensor:
    """(pictures, colours + shapes) logits: the sum of one linear vote per image token."""
    merged, lengths = features(tower, pictures)
    merged = merged / (merged.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    owner = torch.repeat_interleave(torch.arange(len(pictures)), lengths)
    votes = torch.zeros(len(pictures), head.out_features)
    return votes.index_add(0, owner, head(merged)) / 3


def schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 30) * max(0.01, min(1.0, (1 - step / steps) / 0.55))


def train_vision(tower: nn.Module, *, steps: int, seed: int, log) -> None:
    rng = random.Random(seed)
    head = nn.Linear(tower.config.out_hidden_size, len(COLOR_NAMES) + len(SHAPES))
    named = [*tower.named_parameters(), ("head.weight", head.weight), ("head.bias", head.bias)]
    optimiser = Optimiser(named, muon_lr=0.02, adam_lr=4e-3)
    right = []
    for step in range(steps):
        batch = [picture(rng) for _ in range(BATCH)]
        color = torch.tensor([COLOR_NAMES.index(p.color) for p in batch])
        shape = torch.tensor([SHAPES.index(p.shape) for p in batch])
        logits = readout(tower, head, batch)
        color_logits, shape_logits = logits.split([len(COLOR_NAMES), len(SHAPES)], dim=1)
        loss = F.cross_entropy(color_logits, color) + F.cross_entropy(shape_logits, shape)
        loss.backward()
        optimiser.step(schedule(step, steps))
        hits = [(color_logits.argmax(1) == color), (shape_logits.argmax(1) == shape)]
        right.append([h.float().mean().item() for h in hits])
        if step % 100 == 99:
            log(f"vision {step + 1}/{steps} colour, shape right: {np.mean(right[-100:], 0).round(3)}")


@torch.no_grad()
def match_scale(tower: nn.Module, embeddings: torch.Tensor, *, seed: int) -> None:
    """Scale the tower's last layer so that image tokens are as large as word embeddings."""
    rng = random.Random(seed)
    merged, _ = features(tower, [picture(rng) for _ in range(16)])
    ratio = (embeddings.pow(2).mean() / merged.pow(2).mean()).sqrt()
    tower.merger.linear_fc2.weight.mul_(ratio)
    tower.merger.linear_fc2.bias.mul_(ratio)
