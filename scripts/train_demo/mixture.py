"""The choice of the next conversation, so that every kind gets its share of the tokens."""

import random
from collections.abc import Callable

from . import errands, skills, tool_skills
from .chat import Conversation, Turn

Maker = Callable[[random.Random], Conversation]


def chat(turns: Callable[[random.Random], list[Turn]]) -> Maker:
    """Return a maker of conversations without tools."""
    return lambda rng: Conversation(tuple(turns(rng)))


KINDS: dict[str, Maker] = {
    "text": chat(skills.talk), "recall": chat(skills.recall_long), "image": chat(skills.look_and_talk),
    "tools": tool_skills.tools, "agent": errands.agent, "sums": chat(skills.sums),
    "tool_chain": tool_skills.tool_chain, "agent_chain": errands.agent_chain,
}  # fmt: skip
# Only training draws from these kinds: they practise often what the others contain rarely.
PRACTICE: dict[str, Maker] = {
    "recall_near": chat(skills.recall_near), "pictures": chat(skills.pictures), "pairs": tool_skills.pairs,
    "unavailable": chat(tool_skills.unavailable_chain), "agent_far": errands.agent_far,
    "sayings": chat(skills.sayings), "agent_series": errands.agent_series, "agent_odd": errands.agent_odd,
    "odd_sayings": chat(errands.odd_sayings), "agent_long": errands.agent_long,
    "agent_shell": errands.agent_shell, "agent_writes": errands.agent_writes,
}  # fmt: skip
SHORT_SHARES = {
    "text": 0.15, "sums": 0.04, "recall_near": 0.03, "image": 0.08, "pictures": 0.05, "tools": 0.04, "pairs": 0.11,
    "tool_chain": 0.13, "agent_chain": 0.32, "unavailable": 0.02, "drill": 0.03,
}  # fmt: skip
LONG_SHARES = {
    "text": 0.11, "sums": 0.04, "recall": 0.06, "image": 0.08, "pictures": 0.05, "tools": 0.09, "pairs": 0.06,
    "tool_chain": 0.09, "agent": 0.14, "agent_chain": 0.20, "agent_far": 0.06, "unavailable": 0.01, "drill": 0.01,
}  # fmt: skip
LAST_SHARES = {
    "text": 0.06, "sums": 0.02, "recall": 0.04, "image": 0.05, "pictures": 0.03, "tools": 0.12, "pairs": 0.03,
    "tool_chain": 0.12, "agent": 0.19, "agent_chain": 0.27, "agent_far": 0.06, "unavailable": 0.01,
}  # fmt: skip
END_SHARES = {
    "text": 0.09, "sayings": 0.16, "sums": 0.02, "recall": 0.09, "image": 0.06, "pictures": 0.05, "tools": 0.11,
    "pairs": 0.03, "tool_chain": 0.09, "agent": 0.09, "agent_chain": 0.16, "agent_far": 0.04, "unavailable": 0.01,
}  # fmt: skip
FAR_SHARES = {
    "text": 0.05, "sayings": 0.03, "odd_sayings": 0.02, "sums": 0.01, "recall": 0.07, "image": 0.05, "pictures": 0.04,
    "tools": 0.08, "pairs": 0.03, "tool_chain": 0.05, "agent": 0.05, "agent_chain": 0.04, "agent_odd": 0.19,
    "agent_far": 0.05, "agent_series": 0.23, "unavailable": 0.01,
}  # fmt: skip
SHELL_SHARES = {
    "text": 0.05, "sayings": 0.02, "odd_sayings": 0.02, "sums": 0.01, "recall": 0.05, "image": 0.05, "pictures": 0.04,
    "tools": 0.08, "pairs": 0.03, "tool_chain": 0.05, "agent": 0.04, "agent_chain": 0.03, "agent_odd": 0.05,
    "agent_shell": 0.12, "agent_long": 0.36, "unavailable": 0.01,
}  # fmt: skip
WRITE_SHARES = {
    "text": 0.06, "sayings": 0.02, "odd_sayings": 0.03, "sums": 0.01, "recall": 0.05, "image": 0.05, "pictures": 0.04,
    "tools": 0.08, "pairs": 0.03, "tool_chain": 0.05, "agent": 0.04, "agent_chain": 0.03, "agent_odd": 0.04,
    "agent_shell": 0.11, "agent_long": 0.19, "agent_writes": 0.17, "unavailable": 0.01,
}  # fmt: skip
BALANCED_SHARES = {**WRITE_SHARES, "text": 0.09, "agent_long": 0.21, "agent_writes": 0.15}


class Mixture:
    """Picks the kind that is furthest behind its share of the tokens given out so far."""

    def __init__(self, shares: dict[str, float]):
        self.shares: dict[str, float] = {}
        self.change(shares)

    def change(self, shares: dict[str, float]) -> None:
        """Count from zero again if the shares have changed."""
        if shares != self.shares:
            self.shares = shares
            self.given = dict.fromkeys(shares, 0)

    def next_kind(self) -> str:
        return min(self.shares, key=lambda kind: self.given[kind] / self.shares[kind])

    def account(self, kind: str, num_tokens: int) -> None:
        self.given[kind] += num_tokens
