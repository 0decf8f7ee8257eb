"""A step of training: examples as tensors, batches from a mixture, the weighted loss, the optimiser."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .chat import COLORS, IGNORED, SHAPES, Conversation, Encoder, Example
from .errands import by_echo
from .mixture import KINDS, PRACTICE, Mixture


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


WARMUP_STEPS = 30
LAST_RATE = 0.01
THINKING = 0.5
BATCH_TOKENS = 2_560
POOL_BATCHES = 12
ALL_BLOCKS = 0.6  # of the examples show the reasoning of all replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A stretch of the stage, with its own optimiser: the rate falls evenly, a second mixture may follow the first."""

    steps: int
    seed: int
    shares: tuple[dict[str, float], ...]
    first_part: float = 1.0  # of the steps
    top: float = 1.0  # the factor on the learning rates at the start
    opening: float = 1.0  # the least weight of a reply's first tokens in the loss
    blanks: float = 1.0  # the weight of blanks and line breaks: does a text go on here, or end?
    ends: float = 1.0  # the weight of a quote and of a turn's end: as heavy as a blank, or texts go on too long
    echoed: float = 1.0  # the least weight of the first token of a text that the shell echoes, and of its file
    echo_writes: bool = True  # where there is no tool to write
    max_tokens: int = 4_608  # longer conversations are drawn again

    def rate(self, step: int) -> float:
        """Return the factor on the learning rates."""
        fall = 1 - (1 - LAST_RATE) * step / self.steps
        return self.top * min(1.0, (step + 1) / WARMUP_STEPS) * fall

    def shares_at(self, step: int) -> dict[str, float]:
        return self.shares[step >= self.first_part * self.steps]


class Source:
    """Batches of a course without end, the same for the same seed."""

    def __init__(self, encoder: Encoder, num_words: int, course: Course):
        self.encoder, self.num_words, self.course = encoder, num_words, course
        self.rng, self.mixture = random.Random(course.seed), Mixture(course.shares[0])
        self.waiting: list[list[Example]] = []

    def example(self) -> Example:
        kind = self.mixture.next_kind()
        while True:
            made = drill(self.rng, self.num_words) if kind == "drill" else self.encoded({**KINDS, **PRACTICE}[kind])
            if len(made.ids) <= self.course.max_tokens:
                self.mixture.account(kind, len(made.ids))
                return made

    def encoded(self, make: Callable[[random.Random], Conversation]) -> Example:
        conversation = by_echo(make(self.rng)) if self.course.echo_writes else make(self.rng)
        decided = [self.rng.random() < THINKING for _ in conversation.turns]
        return self.encoder.example(conversation, decided.__getitem__, all_blocks=self.rng.random() < ALL_BLOCKS)

    def next_batch(self, step: int) -> list[Example]:
        """Draw from a pool that is sorted by length into batches, which come in random order."""
        if not self.waiting:
            self.mixture.change(self.course.shares_at(step))
            pool, size = [], 0
            while size < POOL_BATCHES * BATCH_TOKENS:
                pool.append(self.example())
                size += len(pool[-1].ids)
            self.waiting = pack(pool, BATCH_TOKENS)
            self.rng.shuffle(self.waiting)
        return self.waiting.pop()


def drill(rng: random.Random, num_words: int) -> Example:
    """Random tokens with spans of them said again: dense practice in copying.

    Ids are below `num_words`. The first token of a repeated span is the cue and is not learned.
    """
    length = rng.randint(16, rng.choice((70, 70, 250)))
    ids = [rng.randrange(1, num_words) for _ in range(length)]
    labels = [IGNORED] * length
    for _ in range(rng.randint(3, 8)):
        size = rng.randint(4, 14)
        start = rng.randrange(length - size)
        span = ids[start : start + size]
        ids += span
        labels += [IGNORED, *span[1:]]
    return Example(ids, labels, [(i, i, i) for i in range(len(ids))], [], [])


MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic, five rounds
ADAM_ONLY = ("embed", "head", "in_proj_a", "in_proj_b")


def orthogonalised(batch: torch.Tensor) -> torch.Tensor:
    """(n, rows, columns) matrices with their singular values pushed towards one."""
    a, b, c = NEWTON_SCHULZ
    tall = batch.shape[1] > batch.shape[2]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Steps every named weight; `scale` is the schedule's factor on both learning rates."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, muon_lr: float, adam_lr: float):
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.matrices: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, weight in named:
            if weight.ndim == 2 and not any(part in name for part in ADAM_ONLY):
                self.matrices.setdefault(tuple(weight.shape), []).append(weight)
            else:
                others.append(weight)
        self.momentum = {shape: torch.zeros(len(ws), *shape) for shape, ws in self.matrices.items()}
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.97), weight_decay=0.0, foreach=True)

    def state(self) -> dict:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def restore(self, state: dict) -> None:
        self.momentum = state["momentum"]
        self.adam.load_state_dict(state["adam"])

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for shape, weights in self.matrices.items():
            self.step_matrices(shape, weights, self.muon_lr * scale)

    def step_matrices(self, shape: tuple[int, ...], weights: list[nn.Parameter], lr: float) -> None:
        if all(w.grad is None for w in weights):  # a batch without pictures leaves the vision tower alone
            return
        gradient = torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
        momentum = self.momentum[shape]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
        step = lr * max(1.0, shape[0] / shape[1]) ** 0.5
        for weight, direction in zip(weights, update, strict=True):
            weight.mul_(1 - WEIGHT_DECAY * lr).add_(direction, alpha=-step)
            weight.grad = None


DECISIVE = 3.0  # weight of a name or a value's first token in a call
OPENING_TOKENS = 5  # `I call Read`: the first tokens of a reply decide the rest


class Weights:
    """Give more weight to the tokens that decide an answer: colours, shapes, digits, and names and values of a call."""

    def __init__(self, encoder: Encoder, vocab_size: int, course: Course):
        self.course = course
        self.by_target = torch.ones(vocab_size)
        for known in (*COLORS, *SHAPES):
            self.by_target[encoder.ids(known)] = 4.0
        self.by_target[encoder.ids("0123456789")] = 2.0
        self.by_target[encoder.ids("<tool_call></think>")] = 2.0
        self.by_target[encoder.ids(" \n")] = course.blanks
        self.by_target[encoder.ids('"<|im_end|>')] = course.ends
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
        weight = torch.where(opens, weight.clamp(min=self.course.opening), weight)
        return torch.where(self.echo_next(ids)[learned], weight.clamp(min=self.course.echoed), weight)

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
