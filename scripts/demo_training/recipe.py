"""The whole run from nothing: tokenizer, vision stage, circuit, joint stage, export. Fixed seeds, counted steps."""

import random
import time
from pathlib import Path

import torch

from . import export, joint_stage, model, tokenizer
from .circuit import write_circuit
from .encode import Encoder, check_template
from .joint_stage import Phase
from .mixture import FIRST_SHARES, KINDS, LATER_SHARES
from .tokenizer import MARKERS, SPECIAL
from .vision_stage import match_scale, train_vision

TOKENIZER_SEED, WEIGHT_SEED, CIRCUIT_SEED, VISION_SEED = 3, 0, 3, 1
FALL = (
    0.985, 0.93, 0.892, 0.829, 0.78, 0.736, 0.718, 0.688, 0.538, 0.449,
    0.314, 0.291, 0.269, 0.248, 0.226, 0.207, 0.162, 0.106, 0.023,
)  # fmt: skip
PHASES = (
    Phase(seed=11, shares=FIRST_SHARES, rates=(1.0,) * 20),
    Phase(seed=12, shares=LATER_SHARES, rates=(1.0,) * 10),
    Phase(seed=13, shares=LATER_SHARES, rates=FALL),
)
STEPS = sum(phase.steps for phase in PHASES)
VISION_STEPS = 3_000
QUIET = ("Ġ", ".", ",", "Ċ", ":", '"', "<|im_end|>", "<|im_start|>")


def train(folder: Path, *, steps: int, vision_cache: Path | None = None) -> None:
    """Leaves a checkpoint in `folder`, renewed every few minutes.

    `STEPS` joint steps made the bundled one; others stretch its course. `vision_cache` keeps the first stage.
    """
    torch.set_num_threads(1)  # sums in a fixed order: the same run gives the same weights
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - start:6.0f}s] {line}", flush=True)

    words = tokenizer.build(TOKENIZER_SEED)
    rng = random.Random(TOKENIZER_SEED + 1)
    check_template(words, [make(rng) for _ in range(50) for make in KINDS.values()])
    ids, ready = tokenizer.token_ids(words), tokenizer.portable(words)
    torch.manual_seed(WEIGHT_SEED)
    net = model.build(ids)
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
    run = joint_stage.Run(log=log, save=lambda: export.export(net, ready, ids, folder))
    num_words = len(words) - len(SPECIAL) - len(MARKERS)
    for phase in PHASES:
        joint_stage.train_joint(net, Encoder(words), ids, num_words, phase.stretched(steps / STEPS), run)
    export.export(net, ready, ids, folder)
    log("done")
