"""Which conversation comes next, so that every kind gets its share of the tokens."""

import random
from collections.abc import Callable

from . import errands, image_skills, text_skills, tool_skills
from .chat import Conversation


def text(rng: random.Random) -> Conversation:
    return Conversation(tuple(text_skills.chat(rng)))


def recall(rng: random.Random) -> Conversation:
    return Conversation(tuple(text_skills.recall_long(rng)))


def image(rng: random.Random) -> Conversation:
    return Conversation(tuple(image_skills.chat(rng)))


def agent(rng: random.Random) -> Conversation:
    return errands.agent(rng)


def sums(rng: random.Random) -> Conversation:
    """Nothing but sums: there are few of them, and each must be learned by heart."""
    return Conversation(tuple(turn for _ in range(8) for turn in text_skills.arithmetic(rng)))


KINDS: dict[str, Callable[[random.Random], Conversation]] = {
    "text": text, "recall": recall, "image": image, "tools": tool_skills.tools, "agent": agent,
    "sums": sums, "tool_chain": tool_skills.tool_chain, "agent_chain": errands.agent_chain,
}  # fmt: skip
FIRST_SHARES = {"text": 0.25, "recall": 0.09, "image": 0.17, "tools": 0.18, "agent": 0.27, "drill": 0.04}
LATER_SHARES = {
    "text": 0.18, "sums": 0.05, "recall": 0.05, "image": 0.20, "tools": 0.07, "tool_chain": 0.14, "agent": 0.11,
    "agent_chain": 0.18, "drill": 0.02,
}  # fmt: skip


class Mixture:
    """Picks the kind that is furthest behind its share of the tokens given out so far."""

    def __init__(self, shares: dict[str, float]):
        self.shares = shares
        self.given = dict.fromkeys(shares, 0)

    def next_kind(self) -> str:
        return min(self.shares, key=lambda kind: self.given[kind] / self.shares[kind])

    def account(self, kind: str, num_tokens: int) -> None:
        self.given[kind] += num_tokens
