"""The whole run from nothing: tokenizer, vision stage, circuit, joint stage, export. Fixed seeds, counted steps."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration

from . import export, joint_stage, model, tokenizer
from .circuit import write_circuit
from .encode import Encoder, check_template
from .joint_stage import Course
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
from .tokenizer import MARKERS, SPECIAL
from .vision_stage import match_scale, train_vision

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
        run = joint_stage.Run(log=log, save=lambda: export.export(net, words, ids, folder), state=state)
        joint_stage.train_joint(net, Encoder(words), ids, num_words, stretched, run)
    export.export(net, words, ids, folder)
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
