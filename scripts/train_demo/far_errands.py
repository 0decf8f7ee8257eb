"""Errands behind the whole prompt of an agent, several in a row, and words to copy that the tokenizer must cut."""

import random

from . import agent_tools, text_skills, words
from .agent_tools import READ, RUN, WRITE, Kit
from .chat import Assistant, Conversation, System, Turn, User, ask
from .errands import READ_FORMS, RUN_FORMS, WRITE_FORMS, Step, errand, steps, with_surroundings

OPENINGS = ("", "", "./", "/", "src/", "/tmp/", "docs/")


def odd_path(rng: random.Random) -> str:
    file = f"{words.odd(rng)}.{rng.choice(words.EXTENSIONS)}"
    folder = f"{words.odd(rng)}/" if rng.random() < 0.3 else ""
    return rng.choice(OPENINGS) + folder + file


def odd_phrase(rng: random.Random) -> str:
    """Return a text of one to four words, most of them odd, as long as the texts of `errands.write_step`."""
    length = rng.randint(1, rng.choice((1, 2, 4)))
    return " ".join(words.odd(rng) if rng.random() < 0.6 else words.word(rng) for _ in range(length))


def odd_command(rng: random.Random) -> str:
    target, word = odd_path(rng), words.odd(rng)
    forms = (
        "cat {t}", "python {t}", "wc -l {t}", "grep {w} {t}", "make {w}", "mkdir {w}", "echo {w} > {t}", "{w} --{w}",
    )  # fmt: skip
    return rng.choice(forms).format(t=target, w=word)


def odd_step(rng: random.Random, action: str) -> Step:
    if action == READ:
        target = odd_path(rng)
        return Step(READ, rng.choice(READ_FORMS).format(p=target), {"path": target})
    if action == RUN:
        line = odd_command(rng)
        return Step(RUN, rng.choice(RUN_FORMS).format(c=line), {"command": line})
    target, text = odd_path(rng), odd_phrase(rng)
    return Step(WRITE, rng.choice(WRITE_FORMS).format(p=target, t=text), {"path": target, "content": text})


def odd_steps(rng: random.Random, amount: int) -> list[Step]:
    """Different actions, one of which writes, because the end of a written text is the hardest to learn."""
    actions = [WRITE, *rng.sample((READ, RUN), amount - 1)]
    rng.shuffle(actions)
    return [odd_step(rng, action) for action in actions]


def series(rng: random.Random, kit: Kit, amount: int) -> list[Turn]:
    """`amount` errands one after the other."""
    turns: list[Turn] = []
    for _ in range(amount):
        turns += errand(rng, kit, rng.choice((3, 3, 2, 1)), rng.choice((steps, odd_steps)))
    return turns


def jumble(rng: random.Random, turns: list[Turn], size: int) -> str:
    """About `size` characters of the user's words in short pieces, to distract the copying."""
    said = " ".join(str(part) for turn in turns if isinstance(turn, User) for part in turn.parts).split()
    pieces: list[str] = []
    while sum(map(len, pieces)) < size:
        start = rng.randrange(len(said))
        pieces.append(" ".join(said[start : start + rng.randint(1, 3)]))
    return " ".join(pieces)


def agent_series(rng: random.Random) -> Conversation:
    """Three to six errands behind a prompt of three to five thousand tokens."""
    kit = agent_tools.kit(rng, crowd=rng.randint(4, 9), size=rng.randint(150, 400))
    turns = with_surroundings(rng, series(rng, kit, rng.randint(3, 6)), rng.randint(1_500, 5_000))
    return Conversation(tuple(turns), kit.tools)


def agent_odd(rng: random.Random) -> Conversation:
    """Two to five errands behind next to nothing, or behind their own words."""
    kit = agent_tools.kit(rng, crowd=rng.choice((0, 0, 1, 3)), size=0)
    turns = series(rng, kit, rng.randint(2, 5))
    if rng.random() < 0.6:
        turns.insert(0, System(jumble(rng, turns, rng.choice((300, 800, 1_600)))))
    return Conversation(tuple(turns), kit.tools)


def odd_sayings(rng: random.Random) -> Conversation:
    turns: list[Turn] = []
    for _ in range(rng.randint(2, 5)):
        text = odd_phrase(rng)
        form = rng.choice(text_skills.SAY)
        turns += [ask(form.format(text)), Assistant(text, "I repeat the text.", "say")]
    return Conversation(tuple(turns))
