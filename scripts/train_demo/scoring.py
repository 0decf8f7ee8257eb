"""Asks a checkpoint through mlx-vlm, greedily, and counts right replies per skill, on new conversations."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from . import agent_tools, errands, mixture, skills
from .chat import Assistant, Conversation, Picture, System, Turn, User, messages, reply_text

SKILLS = (
    "greet", "about", "arithmetic", "count", "say", "recall", "recall_system", "recall_long", "json", "note",
    "fallback", "no_image", "tool", "two_calls", "tool_result", "no_call", "no_tool", "errand", "errand_end",
    "image", "image2", "image3", "image_beside",
)  # fmt: skip
RECALL_FAR = "recall at 1.5k tokens"
ERRAND_FAR = "errand behind 4k tokens"
ERRAND_BARE = "errand behind claude --bare"
ERRAND_OPENCODE = "errand behind opencode's tools"
RECALL_CHARS = 3_200
ERRAND_SIZE = (4_000, 8, 350)  # characters of the system prompt, other tools, characters a tool
MAX_NEW_TOKENS = 160
OPENCODE_SCALE = 0.2  # of its prompt's true length, which makes 4k tokens


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation and the replies in it that must all be right."""

    skill: str
    conversation: Conversation
    turns: tuple[int, ...]
    thinking: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged reply. `missed`: the expected text and the given one."""

    skill: str
    prompt_tokens: int
    missed: tuple[str, str] | None = None


class Score:
    """Counts of right and asked, per skill."""

    def __init__(self):
        self.right: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.prompt_tokens: dict[str, list[int]] = {}

    def add(self, verdict: Verdict) -> None:
        skill = verdict.skill
        self.asked[skill] = self.asked.get(skill, 0) + 1
        self.right[skill] = self.right.get(skill, 0) + (verdict.missed is None)
        self.prompt_tokens.setdefault(skill, []).append(verdict.prompt_tokens)

    def overall(self) -> float:
        """Return the share of right replies over all skills, without the far tests."""
        names = [s for s in self.asked if s in SKILLS]
        return sum(self.right[s] for s in names) / max(1, sum(self.asked[s] for s in names))

    def table(self) -> str:
        lines = ["| skill | right | asked | share | mean prompt |", "|---|---|---|---|---|"]
        for skill in sorted(self.asked, key=[*SKILLS, *self.asked].index):
            lengths = self.prompt_tokens[skill]
            share = self.right[skill] / self.asked[skill]
            counts = f"{self.right[skill]} | {self.asked[skill]} | {share:.0%}"
            lines.append(f"| {skill} | {counts} | {sum(lengths) // len(lengths)} |")
        if any(skill in SKILLS for skill in self.asked):
            lines.append(f"| **all skills** | | | **{self.overall():.1%}** | |")
        return "\n".join(lines)


def answer_of(text: str) -> str:
    """Return the text after the reasoning."""
    return text.rpartition("</think>")[2].strip()


def items(seed: int, per_skill: int) -> Iterator[Item]:
    """Random replies from the kinds of conversation, until every skill has enough."""
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


def recall_far(rng: random.Random) -> Conversation:
    return Conversation(tuple(skills.recall_long(rng, RECALL_CHARS)))


def errand_far(rng: random.Random) -> Conversation:
    return errands.agent(rng, ERRAND_SIZE, long=True)


def errand_of(shape: agent_tools.Shape, scale: float) -> Callable[[random.Random], Conversation]:
    def make(rng: random.Random) -> Conversation:
        prompt, kit = agent_tools.shaped(rng, shape, scale)
        return Conversation((System(prompt), *errands.errand(rng, kit, 3)), kit.tools)

    return make


FAR: dict[str, Callable[[random.Random], Conversation]] = {
    RECALL_FAR: recall_far,
    ERRAND_FAR: errand_far,
    ERRAND_BARE: errand_of(agent_tools.BARE_SHAPE, 1.0),
    ERRAND_OPENCODE: errand_of(agent_tools.OPENCODE_SHAPE, OPENCODE_SCALE),
}


def far_items(seed: int, amount: int) -> Iterator[Item]:
    """Test the last recall over a long text, and errands behind agents' prompts: all replies of one must be right."""
    for name, make in FAR.items():
        rng = random.Random(f"{seed} {name}")
        for i in range(amount):
            conversation = make(rng)
            turns = tuple(index for index, _ in conversation.replies())
            yield Item(name, conversation, turns[-1:] if name == RECALL_FAR else turns, i % 2 == 0)


def with_thoughts(turns: tuple[Turn, ...], thinking: bool) -> tuple[Turn, ...]:
    """Return the history as a client sends it back: reasoning only where there was some."""
    if thinking:
        return turns
    return tuple(replace(t, thought="") if isinstance(t, Assistant) else t for t in turns)


def images(turns: tuple[Turn, ...]) -> list[Image.Image]:
    return [p.image for t in turns if isinstance(t, User) for p in t.parts if isinstance(p, Picture)]


def prompt_of(tokenizer, wire: list[dict], tools: list[dict] | None, thinking: bool) -> str:
    return tokenizer.apply_chat_template(
        wire, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )


class Greedy:
    """A checkpoint in mlx-vlm."""

    def __init__(self, folder: Path):
        from mlx_vlm import load

        self.model, self.processor = load(str(folder))
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)

    def complete(
        self, wire: list[dict], tools: list[dict] | None, thinking: bool, pictures: list[Image.Image]
    ) -> tuple[str, int]:
        """Return the reply to messages, with its reasoning, and the number of prompt tokens."""
        from mlx_vlm import generate

        prompt = prompt_of(self.tokenizer, wire, tools, thinking)
        result = generate(
            self.model, self.processor, prompt, image=pictures or None, max_tokens=MAX_NEW_TOKENS, temperature=0.0
        )
        return result.text.removesuffix("<|im_end|>"), result.prompt_tokens


def judged(asker: Greedy, item: Item) -> Verdict:
    """Asks for each reply of `item` until one is wrong."""
    tools = [t.wire() for t in item.conversation.tools] or None
    length = 0
    for turn in item.turns:
        history = with_thoughts(item.conversation.turns[:turn], item.thinking)
        text, length = asker.complete(messages(history), tools, item.thinking, images(history))
        wanted = reply_text(item.conversation.turns[turn])
        if answer_of(text) != wanted:
            return Verdict(item.skill, length, (wanted, text))
    return Verdict(item.skill, length)


def score(given: Iterable[Verdict], log: Callable[[str], None] = print) -> Score:
    result = Score()
    for verdict in given:
        result.add(verdict)
        if verdict.missed:
            log("missed {}: wanted {!r}, got {!r}".format(verdict.skill, *verdict.missed))
    return result
