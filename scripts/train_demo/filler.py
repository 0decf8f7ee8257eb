"""Prose in the shape of an agent client's prompt: rules, lists, environment blocks. Means nothing, asks for nothing."""

import random

from . import words

OPENINGS = (
    "You are an agent that helps users with software engineering tasks.",
    "You are a coding agent. Use the instructions below and the tools available to you to help the user.",
    "You are an interactive command line tool that helps users with their work.",
    "You are a helpful assistant.",
    "You are Tiny, a small model inside a coding agent.",
)
RULES = (
    "IMPORTANT: {p}.",
    "NEVER {p} unless the user asks for it.",
    "ALWAYS prefer {w} over {w2}.",
    "You should be concise, direct, and {w}.",
    "When the user asks about {w}, {p}.",
    "If you {w} the {w2}, {p}.",
    "Use the {w} tool to {w2} files. Do not use it to {p}.",
    "Do not {w} the {w2} before you {p}.",
    "The {w} of {p} is {w2}.",
    "Run the tests with `{w} {w2}` if you can.",
    "Read files before you edit them.",
    "Only write files when asked: {p}.",
    "Say what you did in {w} lines.",
    "This {w} must be {p}, not {w2}.",
    "Keep in mind that {p} (e.g. \"{w}\", `{w2}`).",
    "Make sure that the {w} is {w2}, then {p}.",
)  # fmt: skip
HEADINGS = ("Tone and style", "Doing tasks", "Tool use", "Code style", "Environment", "Rules", "Notes", "Usage")


def prose(rng: random.Random, high: int = 8) -> str:
    """Return a few words as agent prompts mix them: many small ones, some of the trade, some unknown."""
    pools = (words.COMMON, words.COMMON, words.WORK, words.WORDS)
    picked = [
        words.coined(rng) if rng.random() < 0.12 else rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, high))
    ]
    return " ".join(picked)


def rule(rng: random.Random) -> str:
    return rng.choice(RULES).format(p=prose(rng), w=words.word(rng), w2=words.word(rng))


def paragraph(rng: random.Random) -> str:
    return " ".join(rule(rng) for _ in range(rng.randint(1, 4)))


def bullets(rng: random.Random) -> str:
    mark = rng.choice(("- ", "* ", " - "))
    return "\n".join(mark + rule(rng) for _ in range(rng.randint(2, 5)))


def heading(rng: random.Random) -> str:
    return "#" * rng.randint(1, 3) + " " + rng.choice(HEADINGS)


def environment(rng: random.Random) -> str:
    lines = [
        f"Working directory: /{rng.choice(words.FOLDERS)}/{words.word(rng)}",
        f"Is directory a git repo: {rng.choice(('yes', 'no', 'Yes', 'No'))}",
        f"Platform: {rng.choice(('linux', 'darwin'))}",
        f"Today's date: {rng.choice(('Fri Nov', 'Mon Jan', 'Tue May'))} {words.number(rng, 1, 28)} 2026",
    ]
    return rng.choice(("<env>\n{}\n</env>", "{}", "Here is the environment:\n{}")).format("\n".join(lines))


def example(rng: random.Random) -> str:
    return f"<example>\nuser: {prose(rng)}\nassistant: {prose(rng)}\n</example>"


def blocks(rng: random.Random, size: int) -> str:
    """About `size` characters of prompt text."""
    parts, length = [], 0
    while length < size:
        kind = rng.choice((paragraph, paragraph, bullets, bullets, heading, example, environment))
        parts.append(kind(rng))
        length += len(parts[-1])
    return rng.choice(("\n\n", "\n")).join(parts)


def system_prompt(rng: random.Random, size: int) -> str:
    """Return an opening, then about `size` characters more."""
    text = rng.choice(OPENINGS)
    return text if size <= 0 else text + "\n\n" + blocks(rng, size)


def reminder(rng: random.Random, size: int) -> str:
    """Return the texts that clients put before the user's own words."""
    return f"<system-reminder>\n{blocks(rng, size)}\n</system-reminder>\n"
