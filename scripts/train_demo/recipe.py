"""The whole run from nothing: tokenizer, vision stage, circuit, joint stage, export. Fixed seeds, counted steps."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration

from . import model, tokenizer
from .chat import COLORS, SHAPES, Encoder, Picture, check_template, patches, picture
from .learning import Course, Optimiser, Source, Weights, collate, learn
from .mixture import (
    BALANCED_SHARES,
    END_SHARES,
    FAR_SHARES,
    KINDS,
    LAST_SHARES,
    LONG_SHARES,
    PRACTICE,
    SHELL_SHARES,
    SHORT_SHARES,
    WRITE_SHARES,
)
from .model import TokenIds, write_circuit
from .tokenizer import MARKERS, SPECIAL

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


MUON_LR, ADAM_LR = 0.006, 0.003
LOG_EVERY, SAVE_EVERY = 50, 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outside of a training run: its log, its checkpoints, and the state from which an interrupted run goes on."""

    log: Callable[[str], None]
    save: Callable[[], None]
    state: Path


class Stage:
    """The state of the training between two steps."""

    def __init__(self, model: nn.Module, encoder: Encoder, num_words: int, course: Course):
        self.model, self.course = model, course
        self.optimiser = Optimiser(model.named_parameters(), muon_lr=MUON_LR, adam_lr=ADAM_LR)
        self.source = Source(encoder, num_words, course)
        self.weights = Weights(encoder, model.config.text_config.vocab_size, course)
        self.step = 0

    def advance(self, pad_id: int) -> tuple[float, int]:
        """Take one step. Return its loss and its number of tokens, padding included."""
        batch = collate(self.source.next_batch(self.step), pad_id)
        loss = learn(self.model, batch, self.weights)
        self.optimiser.step(self.course.rate(self.step))
        self.step += 1
        return loss, batch.ids.numel()

    def write(self, file: Path) -> None:
        source = self.source
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimiser.state(), "step": self.step,
            "random": source.rng.getstate(), "mixture": (source.mixture.shares, source.mixture.given),
            "waiting": source.waiting,
        }  # fmt: skip
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    def read(self, file: Path) -> None:
        state = torch.load(file, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimiser.restore(state["optimiser"])
        self.step = state["step"]
        self.source.rng.setstate(state["random"])
        self.source.mixture.shares, self.source.mixture.given = state["mixture"]
        self.source.waiting = state["waiting"]


def train_joint(model: nn.Module, encoder: Encoder, ids: TokenIds, num_words: int, course: Course, run: Run) -> None:
    stage = Stage(model, encoder, num_words, course)
    if run.state.exists():
        stage.read(run.state)
        run.log(f"going on from step {stage.step}")
    losses: list[float] = []
    num_tokens = 0
    while stage.step < course.steps:
        loss, size = stage.advance(ids.text_end)
        losses.append(loss)
        num_tokens += size
        if stage.step % LOG_EVERY == 0:
            mean = sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:])
            run.log(f"step {stage.step}/{course.steps} loss {mean:.4f} tokens {num_tokens}")
        if stage.step % SAVE_EVERY == 0:
            run.save()
            stage.write(run.state)
    stage.write(run.state)


TOKENIZER_SEED, WEIGHT_SEED, CIRCUIT_SEED, VISION_SEED = 3, 0, 3, 1
COURSES = (
    Course(steps=6_200, seed=11, shares=(SHORT_SHARES, LONG_SHARES), first_part=0.45),
    Course(steps=2_600, seed=12, shares=(LAST_SHARES,), top=0.3, opening=2.5),
    Course(steps=800, seed=13, shares=(END_SHARES,), top=0.12, opening=2.5),
    Course(steps=1_700, seed=14, shares=(FAR_SHARES,), top=0.2, opening=2.5, blanks=2.0, max_tokens=6_400),
    Course(
        steps=2_600, seed=15, shares=(SHELL_SHARES,), top=0.25, opening=2.5, blanks=3.0, echoed=4.0, max_tokens=6_400
    ),
    Course(  # from here on the shell writes by other words than an echo
        steps=1_300, seed=16, shares=(WRITE_SHARES,), top=0.2, opening=2.5, blanks=5.0, echoed=3.0,
        echo_writes=False, max_tokens=6_400,
    ),
    Course(
        steps=1_100, seed=17, shares=(BALANCED_SHARES,), top=0.16, opening=2.5, blanks=3.0, ends=3.0, echoed=3.0,
        echo_writes=False, max_tokens=6_400,
    ),
)  # fmt: skip
VISION_STEPS = 3_000
QUIET = ("Ġ", ".", ",", "Ċ", ":", '"', "<|im_end|>", "<|im_start|>")


def train(
    folder: Path,
    *,
    steps: int | None = None,
    taken: tuple[int, Path] | None = None,
) -> None:
    """Write a checkpoint to `folder` every few minutes, and beside it the state from which an interrupted run goes on.

    `steps` other than the courses' own stretch or shorten them. `taken` is how many courses were taken before, and the
    checkpoint they left: the others follow, and give the result of the whole run.
    """
    torch.set_num_threads(1)  # sums in a fixed order: the same run gives the same weights
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - start:6.0f}s] {line}", flush=True)

    words = checked_tokenizer()
    ready = tokenizer.portable(words)
    if taken:
        net, courses = trained_model(taken[1], ready), COURSES[taken[0] :]
    else:
        net, courses = starting_model(words, log), COURSES
    take(courses, net, ready, folder, log, stretch=steps / sum(c.steps for c in courses) if steps else 1.0)
    log("done")


def take(
    courses: tuple[Course, ...],
    net: Qwen3_5ForConditionalGeneration,
    words: PreTrainedTokenizerFast,
    folder: Path,
    log: Callable[[str], None],
    *,
    stretch: float,
) -> None:
    """Return one course after the other, each with an optimiser and a seed of its own."""
    ids, num_words = tokenizer.token_ids(words), len(words) - len(SPECIAL) - len(MARKERS)
    states = [folder.with_name(f"{folder.name}.state{COURSES.index(course)}") for course in courses]
    for course, state in zip(courses, states, strict=True):
        stretched = replace(course, steps=round(course.steps * stretch))
        run = Run(log=log, save=lambda: model.export(net, words, ids, folder), state=state)
        train_joint(net, Encoder(words), ids, num_words, stretched, run)
    model.export(net, words, ids, folder)
    for state in states:
        state.unlink()


def trained_model(folder: Path, words: PreTrainedTokenizerFast) -> Qwen3_5ForConditionalGeneration:
    """Return the checkpoint in `folder`, which must have been made with this tokenizer. A course needs no more."""
    if PreTrainedTokenizerFast.from_pretrained(folder).get_vocab() != words.get_vocab():
        raise SystemExit(f"{folder} has another tokenizer than the one built here: train from nothing")
    net = model.build(tokenizer.token_ids(words))
    known = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    net.load_state_dict(known.state_dict())
    return net


def checked_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer with the chat template, which must write the texts that training reads."""
    words = tokenizer.build(TOKENIZER_SEED)
    rng = random.Random(TOKENIZER_SEED + 1)
    check_template(words, [make(rng) for _ in range(50) for make in (*KINDS.values(), *PRACTICE.values())])
    return words


def starting_model(words: PreTrainedTokenizerFast, log: Callable[[str], None]) -> Qwen3_5ForConditionalGeneration:
    """Return a model that sees and copies already, and knows nothing yet."""
    torch.manual_seed(WEIGHT_SEED)
    net = model.build(tokenizer.token_ids(words))
    log(f"{sum(p.numel() for p in net.parameters())} parameters, {len(words)} tokens")
    tower = net.model.visual
    train_vision(tower, steps=VISION_STEPS, seed=VISION_SEED, log=log)
    language_model = net.model.language_model
    write_circuit(language_model, words.convert_tokens_to_ids(list(QUIET)), seed=CIRCUIT_SEED)
    match_scale(tower, language_model.embed_tokens.weight, seed=VISION_SEED + 1)
    return net
