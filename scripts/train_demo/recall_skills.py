"""Facts told in the chat or the system prompt, and questions about them, near and far."""

import random
from collections.abc import Callable

from . import filler, words
from .chat import Assistant, System, Turn, ask
from .text_skills import small_talk

FACTS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("name", words.name),
    ("city", words.city),
    ("favorite color", lambda r: r.choice(("red", "green", "blue", "yellow", "purple", "orange", "black", "white"))),
    ("pet", words.word),
    ("code", lambda r: words.number(r, 100, 9999)),
    ("secret word", words.word),
    ("password", lambda r: words.coined(r) + words.number(r)),
    ("favorite number", words.number),
    ("job", words.word),
    ("friend", words.name),
    ("project", words.word),
    ("dog", words.name),
)


def facts(rng: random.Random, how_many: int) -> list[tuple[str, str]]:
    """Distinct attributes with values; some attributes are any noun."""
    chosen = [(label, draw(rng)) for label, draw in rng.sample(FACTS, how_many)]
    labels = {label for label, _ in chosen}
    for i in range(how_many):
        noun = rng.choice(words.NOUNS)
        if rng.random() < 0.3 and noun not in labels:
            labels.add(noun)
            chosen[i] = (noun, words.word(rng) if rng.random() < 0.7 else words.number(rng, 0, 9999))
    return chosen


def tell(rng: random.Random, label: str, value: str) -> list[Turn]:
    form = rng.choice(
        (
            "My {} is {}.", "My {} is {}.", "My {} is {}", "Remember: my {} is {}.",
            "Please remember that my {} is {}.", "my {} is {}", "Remember that my {} is {}.",
        )
    )  # fmt: skip
    return [ask(form.format(label, value)), Assistant(f"OK, your {label} is {value}.", f"I note the {label}.", "note")]


def question(rng: random.Random, label: str, value: str, skill: str, owner: str = "my") -> list[Turn]:
    forms = (
        "What is {} {}?",
        "What is {} {}?",
        "What is {} {}?",
        "Tell me {} {}.",
        "what is {} {}?",
        "What was {} {}?",
    )
    whose = "Your" if owner == "my" else "The"
    reply = Assistant(f"{whose} {label} is {value}.", f"The user asks for the {label}.", skill)
    return [ask(rng.choice(forms).format(owner, label)), reply]


def recall(rng: random.Random) -> list[Turn]:
    """Facts told in the chat, perhaps other talk, then questions."""
    known = facts(rng, rng.choice((1, 1, 2, 3)))
    turns: list[Turn] = []
    if rng.random() < 0.25 and len(known) > 1:
        both = " and ".join(f"my {label} is {value}" for label, value in known)
        turns += [ask(f"{both[0].upper()}{both[1:]}."), Assistant("OK, I will remember.", "I note this.", "note")]
    else:
        for label, value in known:
            turns += tell(rng, label, value)
    for _ in range(rng.choice((0, 0, 1, 2))):
        turns += small_talk(rng)
    for label, value in rng.sample(known, min(len(known), rng.choice((1, 1, 2)))):
        turns += question(rng, label, value, "recall")
    return turns


def fact_sheet(rng: random.Random, known: list[tuple[str, str]]) -> str:
    form, glue = rng.choice(
        (("The {} is {}.", " "), ("The {} is {}.", "\n"), ("The {} is {}.", " "), ("- The {} is {}.", "\n"))
    )
    return glue.join(form.format(label, value) for label, value in known)


def recall_system(rng: random.Random) -> list[Turn]:
    """Facts from the system prompt."""
    known = facts(rng, rng.choice((1, 2, 2, 3, 4)))
    sheet = fact_sheet(rng, known)
    if rng.random() < 0.5:
        sheet = f"{rng.choice(filler.OPENINGS)} {sheet}"
    turns: list[Turn] = [System(sheet)]
    if rng.random() < 0.2:
        turns += small_talk(rng)
    for label, value in rng.sample(known, min(len(known), rng.choice((1, 2)))):
        turns += question(rng, label, value, "recall_system", "the")
    return turns


def notes(rng: random.Random, size: int) -> list[Turn]:
    """Return a long text that the user pastes."""
    lead = rng.choice(("Here is some text:\n", "Here are my notes:\n", "Here is a long text:\n"))
    reply = Assistant("OK, I have read it.", "The user shows me a text.", "note")
    return [ask(lead + filler.blocks(rng, size)), reply]


def recall_long(rng: random.Random, size: int | None = None) -> list[Turn]:
    """Facts, about `size` characters of something else, then several questions."""
    size = rng.choice((200, 500, 1000, 1800, 2800, 4200)) if size is None else size
    known = facts(rng, rng.choice((1, 2, 3)))
    asked = rng.sample(known, min(len(known), 3))
    if rng.random() < 0.4:
        parts = [fact_sheet(rng, known), filler.blocks(rng, size)]
        if rng.random() < 0.3:
            parts.insert(0, filler.blocks(rng, size // 3))
        turns: list[Turn] = [System("\n\n".join(parts))]
        owner = "the"
    else:
        turns = [t for label, value in known for t in tell(rng, label, value)]
        turns += notes(rng, size)
        owner = "my"
    if rng.random() < 0.3:
        turns += small_talk(rng)
    return turns + [t for label, value in asked for t in question(rng, label, value, "recall_long", owner)]
