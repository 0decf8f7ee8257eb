"""The weighted loss of a batch. Some tokens decide an answer, most follow from them."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import Batch, learned_logits, learned_places
from .encode import Encoder
from .pictures import COLORS, SHAPES

DECISIVE = 3.0  # weight of a name or a value's first token in a call
OPENING_TOKENS = 5  # `I call Read`: what a reply starts with decides the rest


class Weights:
    """What decides an answer weighs more: colours and shapes, digits, and in a call its names and values."""

    def __init__(self, encoder: Encoder, vocab_size: int, *, opening: float, blanks: float):
        """`opening`: the least weight of a reply's first tokens; `blanks`: of what goes between words or after them."""
        self.opening = opening
        self.by_target = torch.ones(vocab_size)
        for known in (*COLORS, *SHAPES):
            self.by_target[encoder.ids(known)] = 4.0
        self.by_target[encoder.ids("0123456789")] = 2.0
        self.by_target[encoder.ids("<tool_call></think>")] = 2.0
        self.by_target[encoder.ids(" \n")] = blanks
        self.openers = torch.tensor(encoder.ids("<function=<parameter="))
        self.end_of_tag, self.line_break = encoder.ids(">\n")

    def of(self, batch: Batch, learned: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One weight for each learned token; `learned`: (rows, tokens - 1)."""
        ids = batch.ids
        value_next = torch.zeros_like(ids, dtype=torch.bool)
        value_next[:, 1:] = (ids[:, 1:] == self.line_break) & (ids[:, :-1] == self.end_of_tag)
        decisive = (torch.isin(ids, self.openers) | value_next)[:, :-1][learned]
        weight = torch.where(decisive, DECISIVE, self.by_target[targets])
        opens = (places_in_reply(learned) < OPENING_TOKENS)[learned]
        return torch.where(opens, weight.clamp(min=self.opening), weight)


def places_in_reply(learned: torch.Tensor) -> torch.Tensor:
    """(rows, tokens): how many learned tokens stand directly before each learned one."""
    counts = learned.long().cumsum(1)
    before = torch.where(learned, 0, counts).cummax(1).values
    return counts - before - 1


def learn(model: nn.Module, batch: Batch, weights: Weights) -> float:
    """Leaves the clipped gradients on the model and gives the loss."""
    logits, targets = learned_logits(model, batch)
    weight = weights.of(batch, learned_places(batch), targets)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    return loss.item()
