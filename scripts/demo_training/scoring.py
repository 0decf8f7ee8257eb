"""Greedy replies through mlx-vlm and the chat template, counted per skill on conversations never trained on."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from . import errands, mixture, text_skills
from .chat import Assistant, Conversation, Turn, User, messages, reply_text
from .pictures import Picture

SKILLS = (
    "greet", "about", "arithmetic", "count", "say", "recall", "recall_system", "recall_long", "json", "note",
    "fallback", "no_image", "tool", "two_calls", "tool_result", "no_call", "no_tool", "errand", "errand_end",
    "image", "image2", "image3", "image_beside",
)  # fmt: skip
RECALL_FAR, ERRAND_FAR = "recall at 1.5k tokens", "errand behind 4k tokens"
RECALL_CHARS = 3_200
ERRAND_SIZE = (4_000, 8, 450)  # characters of the system prompt, other tools, characters a tool
MAX_NEW_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation and the replies in it that must all be right."""

    skill: str
    conversation: Conversation
    turns: tuple[int, ...]
    thinking: bool


@dataclass(frozen=True, slots=True)
class Miss:
    skill: str
    wanted: str
    given: str


class Score:
    """Counts of right and asked, per skill."""

    def __init__(self):
        self.right: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.misses: list[Miss] = []
        self.prompt_tokens: dict[str, list[int]] = {}

    def add(self, skill: str, good: bool) -> None:
        self.asked[skill] = self.asked.get(skill, 0) + 1
        self.right[skill] = self.right.get(skill, 0) + good

    def overall(self) -> float:
        """Of the skills proper; the two far tests stand beside them."""
        names = [s for s in self.asked if s in SKILLS]
        return sum(self.right[s] for s in names) / max(1, sum(self.asked[s] for s in names))

    def table(self) -> str:
        lines = ["| skill | right | asked | share | mean prompt |", "|---|---|---|---|---|"]
        for skill, asked in self.asked.items():
            lengths = self.prompt_tokens.get(skill, [0])
            share = self.right[skill] / asked
            lines.append(f"| {skill} | {self.right[skill]} | {asked} | {share:.0%} | {sum(lengths) // len(lengths)} |")
        return "\n".join([*lines, f"| **all skills** | | | **{self.overall():.1%}** | |"])


class Greedy:
    """A checkpoint in mlx-vlm, asked one question at a time."""

    def __init__(self, folder: Path):
        from mlx_vlm import load

        self.model, self.processor = load(str(folder))
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)

    def reply(self, turns: tuple[Turn, ...], tools: list[dict] | None, thinking: bool) -> tuple[str, int]:
        """The reply after `turns`, reasoning and all, and the length of its prompt."""
        pictures = [p.image for t in turns if isinstance(t, User) for p in t.parts if isinstance(p, Picture)]
        return self.complete(messages(turns), tools, thinking, pictures)

    def complete(
        self, wire: list[dict], tools: list[dict] | None, thinking: bool, pictures: list[Image.Image]
    ) -> tuple[str, int]:
        from mlx_vlm import generate

        prompt = self.tokenizer.apply_chat_template(
            wire, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        result = generate(
            self.model, self.processor, prompt, image=pictures or None, max_tokens=MAX_NEW_TOKENS, temperature=0.0
        )
        return result.text.removesuffix("<|im_end|>"), result.prompt_tokens


def answer_of(text: str) -> str:
    """What stands after the reasoning."""
    return text.rpartition("</think>")[2].strip()


def items(seed: int, per_skill: int) -> Iterator[Item]:
    """Random replies from the training mixture, until every skill has enough."""
    rng = random.Random(seed)
    left = dict.fromkeys(SKILLS, per_skill)
    makers = [*mixture.KINDS.values()]
    while any(left.values()):
        conversation = rng.choice(makers)(rng)
        wanted = [(i, reply.skill) for i, reply in conversation.replies() if left.get(reply.skill)]
        if wanted:
            turn, skill = rng.choice(wanted)
            left[skill] -= 1
            yield Item(skill, conversation, (turn,), rng.random() < 0.5)


def far_items(seed: int, amount: int) -> Iterator[Item]:
    """Recall over a long text, and whole errands behind an agent's prompt: all replies of one must be right."""
    rng = random.Random(seed)
    for i in range(amount):
        conversation = Conversation(tuple(text_skills.recall_long(rng, RECALL_CHARS)))
        last = max(index for index, _ in conversation.replies())
        yield Item(RECALL_FAR, conversation, (last,), i % 2 == 0)
    for i in range(amount):
        conversation = errands.agent(rng, ERRAND_SIZE, long=True)
        yield Item(ERRAND_FAR, conversation, tuple(index for index, _ in conversation.replies()), i % 2 == 0)


def with_thoughts(turns: tuple[Turn, ...], thinking: bool) -> tuple[Turn, ...]:
    """The history as a client sends it back: reasoning only where there was some."""
    if thinking:
        return turns
    return tuple(replace(t, thought="") if isinstance(t, Assistant) else t for t in turns)


def score(folder: Path, *, seed: int, per_skill: int, far: int, log: Callable[[str], None] = print) -> Score:
    greedy, result = Greedy(folder), Score()
    for item in [*items(seed, per_skill), *far_items(seed + 1, far)]:
        good = True
        tools = [t.wire() for t in item.conversation.tools] or None
        for turn in item.turns:
            history = with_thoughts(item.conversation.turns[:turn], item.thinking)
            text, length = greedy.reply(history, tools, item.thinking)
            result.prompt_tokens.setdefault(item.skill, []).append(length)
            wanted = reply_text(item.conversation.turns[turn])
            if answer_of(text) != wanted:
                result.misses.append(Miss(item.skill, wanted, text))
                good = False
                break
        result.add(item.skill, good)
    for miss in result.misses[:60]:
        log(f"missed {miss.skill}: wanted {miss.wanted!r}, got {miss.given!r}")
    return result
