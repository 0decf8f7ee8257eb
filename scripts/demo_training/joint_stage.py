"""The second stage: words and pictures together, on an endless mixture, scored by teacher forcing as it goes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from .batches import Batch, collate, learned_logits, pack
from .chat import Conversation
from .drill import drill
from .encode import Encoder, Example
from .held_out import MAX_TOKENS, THINKING, held_out_examples, teacher_forced
from .mixture import KINDS, Mixture
from .model import TokenIds
from .optimiser import Optimiser
from .pictures import COLORS, SHAPES

BATCH_TOKENS = 2_560
POOL_BATCHES = 12
ALL_BLOCKS = 0.6
WARMUP_STEPS = 30
BLOCK = 50  # steps at one rate
MUON_LR, ADAM_LR = 0.006, 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the stage, with its own mixture, seed and optimiser. `rates` has the factor for each fifty steps."""

    seed: int
    shares: dict[str, float]
    rates: tuple[float, ...]

    @property
    def steps(self) -> int:
        return BLOCK * len(self.rates)

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / WARMUP_STEPS) * self.rates[step // BLOCK]

    def stretched(self, factor: float) -> "Phase":
        """The same course in more or fewer steps."""
        blocks = max(1, round(len(self.rates) * factor))
        return replace(self, rates=tuple(self.rates[i * len(self.rates) // blocks] for i in range(blocks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What lies around the training: where lines and checkpoints go."""

    log: Callable[[str], None]
    save: Callable[[], None]
    save_every: int = 250
    eval_every: int = 600


class Source:
    """Batches without end, the same for the same seed."""

    def __init__(self, encoder: Encoder, num_words: int, phase: Phase):
        self.encoder, self.num_words = encoder, num_words
        self.rng = random.Random(phase.seed)
        self.mixture = Mixture(phase.shares)

    def example(self) -> Example:
        kind = self.mixture.next_kind()
        while True:
            made = drill(self.rng, self.num_words) if kind == "drill" else self.encoded(KINDS[kind](self.rng))
            if len(made.ids) <= MAX_TOKENS:
                self.mixture.account(kind, len(made.ids))
                return made

    def encoded(self, conversation: Conversation) -> Example:
        decided = [self.rng.random() < THINKING for _ in conversation.turns]
        return self.encoder.example(conversation, decided.__getitem__, all_blocks=self.rng.random() < ALL_BLOCKS)

    def batches(self) -> Iterator[list[Example]]:
        """Draws a pool, sorts it by length into batches, gives them in random order."""
        while True:
            pool, size = [], 0
            while size < POOL_BATCHES * BATCH_TOKENS:
                pool.append(self.example())
                size += len(pool[-1].ids)
            groups = pack(pool, BATCH_TOKENS)
            self.rng.shuffle(groups)
            yield from groups


def token_weights(encoder: Encoder, vocab_size: int) -> torch.Tensor:
    """What decides an answer weighs more: colours and shapes, digits, the start of a call."""
    weights = torch.ones(vocab_size)
    for known in (*COLORS, *SHAPES):
        weights[encoder.ids(known)] = 4.0
    weights[encoder.ids("0123456789")] = 2.0
    weights[encoder.ids("<tool_call></think>")] = 2.0
    return weights


def learn(model: nn.Module, batch: Batch, weights: torch.Tensor) -> float:
    """Leaves the clipped gradients on the model and gives the loss."""
    logits, targets = learned_logits(model, batch)
    by_token = F.cross_entropy(logits, targets, reduction="none")
    loss = (by_token * weights[targets]).sum() / weights[targets].sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    return loss.item()


def train_joint(model: nn.Module, encoder: Encoder, ids: TokenIds, num_words: int, phase: Phase, run: Run) -> None:
    weights = token_weights(encoder, model.config.text_config.vocab_size)
    optimiser = Optimiser(model.named_parameters(), muon_lr=MUON_LR, adam_lr=ADAM_LR)
    held_out = held_out_examples(encoder, seed=phase.seed + 1_000)
    source = Source(encoder, num_words, phase)
    losses: list[float] = []
    num_tokens = 0
    for step, examples in zip(range(phase.steps), source.batches(), strict=False):
        batch = collate(examples, ids.text_end)
        losses.append(learn(model, batch, weights))
        optimiser.step(phase.rate(step))
        num_tokens += batch.ids.numel()
        if step % 50 == 49:
            run.log(f"step {step + 1}/{phase.steps} loss {sum(losses[-50:]) / 50:.4f} tokens {num_tokens}")
        if step % run.save_every == run.save_every - 1:
            run.save()
        if step % run.eval_every == run.eval_every - 1:
            run.log(f"held out: {teacher_forced(model, held_out, ids.text_end)}")
