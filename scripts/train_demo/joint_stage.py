"""The second stage: words and pictures together, on endless mixtures, scored by teacher forcing as it goes."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .batches import collate
from .encode import Encoder
from .held_out import MAX_TOKENS, held_out_examples, teacher_forced
from .loss import Weights, learn
from .mixture import Mixture
from .model import TokenIds
from .optimiser import Optimiser
from .source import Source

WARMUP_STEPS = 30
LAST_RATE = 0.01
MUON_LR, ADAM_LR = 0.006, 0.003
LOG_EVERY, SAVE_EVERY, EVAL_EVERY = 50, 250, 600


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
    max_tokens: int = MAX_TOKENS  # longer conversations are drawn again

    def rate(self, step: int) -> float:
        """Return the factor on the learning rates."""
        fall = 1 - (1 - LAST_RATE) * step / self.steps
        return self.top * min(1.0, (step + 1) / WARMUP_STEPS) * fall

    def shares_at(self, step: int) -> dict[str, float]:
        return self.shares[step >= self.first_part * self.steps]


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
        self.source = Source(
            encoder,
            num_words,
            random.Random(course.seed),
            Mixture(course.shares[0]),
            course.max_tokens,
            course.echo_writes,
        )
        self.weights = Weights(
            encoder,
            model.config.text_config.vocab_size,
            opening=course.opening,
            blanks=course.blanks,
            ends=course.ends,
            echoed=course.echoed,
        )
        self.step = 0

    def advance(self, pad_id: int) -> tuple[float, int]:
        """Take one step. Return its loss and its number of tokens, padding included."""
        batch = collate(self.source.next_batch(self.course.shares_at(self.step)), pad_id)
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
    held_out = held_out_examples(encoder, seed=course.seed + 1_000)
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
        if stage.step % EVAL_EVERY == 0:
            run.log(f"held out: {teacher_forced(model, held_out, ids.text_end)}")
    stage.write(run.state)
