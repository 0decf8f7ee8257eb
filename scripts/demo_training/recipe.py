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
from .mixture import END_SHARES, KINDS, LAST_SHARES, LONG_SHARES, PRACTICE, SHORT_SHARES
from .tokenizer import MARKERS, SPECIAL
from .vision_stage import match_scale, train_vision

TOKENIZER_SEED, WEIGHT_SEED, CIRCUIT_SEED, VISION_SEED = 3, 0, 3, 1
COURSES = (
    Course(steps=6_200, seed=11, shares=(SHORT_SHARES, LONG_SHARES), first_part=0.45),
    Course(steps=2_600, seed=12, shares=(LAST_SHARES,), top=0.3, opening=2.5),
    Course(steps=800, seed=13, shares=(END_SHARES,), top=0.12, opening=2.5),
)
STEPS = sum(course.steps for course in COURSES)
VISION_STEPS = 3_000
QUIET = ("Ġ", ".", ",", "Ċ", ":", '"', "<|im_end|>", "<|im_start|>")


def train(folder: Path, *, steps: int = STEPS, vision_cache: Path | None = None) -> None:
    """Leaves a checkpoint in `folder`, renewed every few minutes; beside it what an interrupted run goes on from.

    `steps` other than the bundled checkpoint's stretch or shorten its courses. `vision_cache` keeps the first stage.
    """
    torch.set_num_threads(1)  # sums in a fixed order: the same run gives the same weights
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - start:6.0f}s] {line}", flush=True)

    words = checked_tokenizer()
    ids, ready = tokenizer.token_ids(words), tokenizer.portable(words)
    net = starting_model(words, vision_cache, log)
    num_words = len(words) - len(SPECIAL) - len(MARKERS)
    states = [folder.with_name(f"{folder.name}.state{i}") for i in range(len(COURSES))]
    for course, state in zip(COURSES, states, strict=True):
        stretched = replace(course, steps=round(course.steps * steps / STEPS))
        run = joint_stage.Run(log=log, save=lambda: export.export(net, ready, ids, folder), state=state)
        joint_stage.train_joint(net, Encoder(ready), ids, num_words, stretched, run)
    export.export(net, ready, ids, folder)
    for state in states:
        state.unlink()
    log("done")


def checked_tokenizer() -> PreTrainedTokenizerFast:
    """With the chat template, which writes what training will read."""
    words = tokenizer.build(TOKENIZER_SEED)
    rng = random.Random(TOKENIZER_SEED + 1)
    check_template(words, [make(rng) for _ in range(50) for make in (*KINDS.values(), *PRACTICE.values())])
    return words


def starting_model(
    words: PreTrainedTokenizerFast, vision_cache: Path | None, log: Callable[[str], None]
) -> Qwen3_5ForConditionalGeneration:
    """Sees already, and copies; knows nothing yet."""
    torch.manual_seed(WEIGHT_SEED)
    net = model.build(tokenizer.token_ids(words))
    log(f"{sum(p.numel() for p in net.parameters())} parameters, {len(words)} tokens")
    tower = net.model.visual
    if vision_cache and vision_cache.exists():
        tower.load_state_dict(torch.load(vision_cache))
    else:
        train_vision(tower, steps=VISION_STEPS, seed=VISION_SEED, log=log)
        if vision_cache:
            torch.save(tower.state_dict(), vision_cache)
    language_model = net.model.language_model
    write_circuit(language_model, words.convert_tokens_to_ids(list(QUIET)), seed=CIRCUIT_SEED)
    match_scale(tower, language_model.embed_tokens.weight, seed=VISION_SEED + 1)
    return net
