"""A chat in words only: some of the short skills in a row."""

import random

from . import filler
from .chat import System, Turn
from .image_skills import no_image
from .recall_skills import recall, recall_system
from .text_skills import about, arithmetic, count, fallback, greet, json_reply, say

SHORT = {
    greet: 1.0, about: 0.8, arithmetic: 3.5, say: 2.0, recall: 2.2, recall_system: 1.8, json_reply: 1.8, count: 1.0,
    fallback: 1.4, no_image: 0.4,
}  # fmt: skip
ONE_SHOT = {k: v for k, v in SHORT.items() if k not in (recall_system, recall)}


def chat(rng: random.Random) -> list[Turn]:
    """Draw one to three skills in a row; the system prompt, if any, comes first."""
    turns: list[Turn] = []
    for i in range(rng.randint(1, 3)):
        pool = SHORT if i == 0 else {**ONE_SHOT, recall: 2.0}
        turns += rng.choices(list(pool), list(pool.values()))[0](rng)
    if not isinstance(turns[0], System) and rng.random() < 0.25:
        turns.insert(0, System(rng.choice((*filler.OPENINGS, "Be brief.", "You are Tiny."))))
    return turns
