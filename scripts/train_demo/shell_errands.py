"""Errands whose steps are easily mixed up: commands that echo beside writes by the shell, and longer texts."""

import random

from . import agent_tools, words
from .agent_tools import READ, RUN, WRITE, Kit
from .chat import Conversation, System, Turn
from .errands import READ_FORMS, RUN_FORMS, WRITE_FORMS, Step, errand, steps, with_surroundings
from .far_errands import jumble, odd_command, odd_path, odd_steps

MAX_WORDS = 5
# Characters of the system prompt, other tools, characters a tool: many tools told briefly, or few at length.
LONG_SHAPES = (((1_500, 4_500), (4, 9), (150, 400)), ((100, 1_500), (0, 2), (500, 1_500)))


def mixed_path(rng: random.Random) -> str:
    return rng.choice((words.path, words.path, odd_path))(rng)


def mixed_phrase(rng: random.Random, length: int) -> str:
    text = " ".join(rng.choice((words.word, words.word, words.odd))(rng) for _ in range(length))
    return text.capitalize() if rng.random() < 0.2 else text


def shell_line(rng: random.Random) -> str:
    """Return a command, mostly an `echo`."""
    kind, text = rng.random(), mixed_phrase(rng, rng.randint(1, 3))
    if kind < 0.4:
        return f"echo {text}"
    if kind < 0.6:
        return f"echo {text} > {mixed_path(rng)}"
    return rng.choice((words.command, odd_command))(rng)


def shell_step(rng: random.Random, action: str) -> Step:
    if action == RUN:
        line = shell_line(rng)
        return Step(RUN, rng.choice(RUN_FORMS).format(c=line), {"command": line})
    target = mixed_path(rng)
    if action == READ:
        return Step(READ, rng.choice(READ_FORMS).format(p=target), {"path": target})
    text = mixed_phrase(rng, rng.randint(1, MAX_WORDS))
    return Step(WRITE, rng.choice(WRITE_FORMS).format(p=target, t=text), {"path": target, "content": text})


def shell_steps(rng: random.Random, amount: int) -> list[Step]:
    """Distinct actions in any order, writing among them."""
    actions = [READ, RUN, WRITE]
    if amount < 3 or rng.random() < 0.5:
        others = rng.sample((RUN, READ), amount - 1)
        actions = rng.sample((WRITE, *others), amount)
    return [shell_step(rng, action) for action in actions]


def series(rng: random.Random, kit: Kit, amount: int) -> list[Turn]:
    """`amount` errands one after the other."""
    turns: list[Turn] = []
    for _ in range(amount):
        draw = rng.choice((shell_steps, shell_steps, steps, odd_steps))
        turns += errand(rng, kit, rng.choice((3, 3, 3, 2)), draw)
    return turns


def agent_long(rng: random.Random) -> Conversation:
    """Three to nine errands behind a prompt of two to five thousand tokens; nearly half of the agents cannot write."""
    prompt, crowd, size = (rng.randint(*ends) for ends in rng.choice(LONG_SHAPES))
    kit = agent_tools.kit(rng, crowd=crowd, size=size, without_write=0.45)
    turns = with_surroundings(rng, series(rng, kit, rng.randint(3, 9)), prompt)
    return Conversation(tuple(turns), kit.tools)


def agent_writes(rng: random.Random) -> Conversation:
    """As many short errands behind such a prompt, most of them to write; at times it holds their words as well."""
    prompt, crowd, size = (rng.randint(*ends) for ends in rng.choice(LONG_SHAPES))
    kit = agent_tools.kit(rng, crowd=crowd, size=size, without_write=0.3)
    asked: list[Turn] = []
    for _ in range(rng.randint(6, 14)):
        asked += errand(rng, kit, rng.choice((1, 1, 2, 3)), shell_steps)
    turns = with_surroundings(rng, asked, prompt)
    if isinstance(turns[0], System) and rng.random() < 0.4:
        turns[0] = System(f"{turns[0].text}\n\n{jumble(rng, asked, 1_500)}")
    return Conversation(tuple(turns), kit.tools)


def agent_shell(rng: random.Random) -> Conversation:
    """Two to six errands behind next to nothing, or behind their own words; most of the agents cannot write."""
    kit = agent_tools.kit(rng, crowd=rng.choice((0, 0, 1, 3)), size=0, without_write=0.7)
    turns = series(rng, kit, rng.randint(2, 6))
    if rng.random() < 0.6:
        turns.insert(0, System(jumble(rng, turns, rng.choice((300, 800, 1_600, 3_000)))))
    return Conversation(tuple(turns), kit.tools)
