"""Scores conversations that were never trained on, by teacher forcing, while training runs."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .batches import collate, learned_logits
from .encode import IGNORED, Encoder, Example
from .mixture import KINDS

MAX_TOKENS = 4_608  # longer conversations are drawn again
THINKING = 0.5


@dataclass(frozen=True, slots=True)
class HeldOut:
    """An example and the skill of each of its replies."""

    example: Example
    skills: list[str]


def held_out_examples(encoder: Encoder, *, seed: int, per_kind: int = 40) -> list[HeldOut]:
    rng = random.Random(seed)
    found = []
    for make in KINDS.values():
        kept = 0
        while kept < per_kind:
            conversation = make(rng)
            decided = [rng.random() < THINKING for _ in conversation.turns]
            example = encoder.example(conversation, decided.__getitem__, all_blocks=False)
            if len(example.ids) <= MAX_TOKENS:
                found.append(HeldOut(example, [reply.skill for _, reply in conversation.replies()]))
                kept += 1
    return sorted(found, key=lambda h: len(h.example.ids))


@torch.no_grad()
def teacher_forced(model: nn.Module, held_out: list[HeldOut], pad_id: int) -> dict[str, float]:
    """Return the share of replies whose tokens are all the likeliest, so that greedy decoding would get them right."""
    right: dict[str, list[bool]] = defaultdict(list)
    for item in held_out:
        batch = collate([item.example], pad_id)
        logits, targets = learned_logits(model, batch)
        hits = iter((logits.argmax(-1) == targets).tolist())
        for skill, good in zip(item.skills, whole_replies(item.example.labels, hits), strict=True):
            right[skill].append(good)
    return {skill: round(sum(r) / len(r), 2) for skill, r in sorted(right.items())}


def whole_replies(labels: list[int], hits: Iterator[bool]) -> list[bool]:
    """Return one verdict for each run of learned labels."""
    verdicts: list[bool] = []
    inside = False
    for label in labels[1:]:
        if label != IGNORED:
            good = next(hits)
            verdicts[-1:] = [verdicts[-1] and good] if inside else [*verdicts[-1:], good]
        inside = label != IGNORED
    return verdicts
