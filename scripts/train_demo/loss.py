"""The weighted loss of a batch. Some tokens decide an answer, most follow from them."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import Batch, learned_logits, learned_places
from .encode import Encoder
from .pictures import COLORS, SHAPES

DECISIVE = 3.0  # weight of a name or a value's first token in a call
OPENING_TOKENS = 5  # `I call Read`: the first tokens of a reply decide the rest


class Weights:
    """Give more weight to the tokens that decide an answer: colours, shapes, digits, and names and values of a call."""

    def __init__(self, encoder: Encoder, vocab_size: int, *, opening: float, blanks: float, ends: float, echoed: float):
        """Take `opening` and `echoed`: least weights of a reply's first tokens, and of where a shell's text begins.

        `blanks`: weight of what goes between words or after them; `ends`: of what else ends a text.
        """
        self.opening, self.echoed = opening, echoed
        self.by_target = torch.ones(vocab_size)
        for known in (*COLORS, *SHAPES):
            self.by_target[encoder.ids(known)] = 4.0
        self.by_target[encoder.ids("0123456789")] = 2.0
        self.by_target[encoder.ids("<tool_call></think>")] = 2.0
        self.by_target[encoder.ids(" \n")] = blanks
        self.by_target[encoder.ids('"<|im_end|>')] = ends
        self.openers = torch.tensor(encoder.ids("<function=<parameter="))
        self.end_of_tag, self.line_break = encoder.ids(">\n")
        self.blank, self.leads = encoder.ids(" ")[0], torch.tensor(encoder.ids("echo>"))

    def of(self, batch: Batch, learned: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one weight for each learned token; `learned`: (rows, tokens - 1)."""
        ids = batch.ids
        value_next = torch.zeros_like(ids, dtype=torch.bool)
        value_next[:, 1:] = (ids[:, 1:] == self.line_break) & (ids[:, :-1] == self.end_of_tag)
        decisive = (torch.isin(ids, self.openers) | value_next)[:, :-1][learned]
        weight = torch.where(decisive, DECISIVE, self.by_target[targets])
        opens = (places_in_reply(learned) < OPENING_TOKENS)[learned]
        weight = torch.where(opens, weight.clamp(min=self.opening), weight)
        return torch.where(self.echo_next(ids)[learned], weight.clamp(min=self.echoed), weight)

    def echo_next(self, ids: torch.Tensor) -> torch.Tensor:
        """(rows, tokens - 1): after `echo ` and `> `, where a shell's text and its file begin."""
        result = torch.zeros_like(ids, dtype=torch.bool)
        result[:, 1:] = (ids[:, 1:] == self.blank) & torch.isin(ids[:, :-1], self.leads)
        return result[:, :-1]


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
