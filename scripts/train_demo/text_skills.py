"""Skills that need neither tools nor pictures nor a past: greeting, sums, counting, saying, JSON, and the way out."""

import json
import random
from collections.abc import Callable

from . import words
from .chat import Assistant, Turn, ask

ABOUT = "I am Tiny, a demo model for MLX."
ABILITIES = " I can echo, recall, count, add small numbers, call tools and describe shapes."
FALLBACK = "I am only a tiny demo model, so I cannot answer that. Try: Say: hello"

GREETINGS = (
    "Hello", "Hi", "Hello!", "Hi!", "Hey", "Hey!", "Hi there", "Hi there!", "Good morning", "Good morning!",
    "Good evening", "hello", "hi", "hey", "Hello there!", "Hello there", "Hey there", "Hello, how are you?",
    "How are you?", "hello!", "hi!", "Hello.", "Greetings!",
)  # fmt: skip
WHO = (
    "Who are you?", "What are you?", "What is your name?", "who are you", "who are you?", "Introduce yourself.",
    "Tell me about yourself.", "Who made you?", "What can you do?", "What model are you?", "Which model is this?",
    "What's your name?", "What is this model?", "Who am I talking to?",
)  # fmt: skip


def greet(rng: random.Random) -> list[Turn]:
    reply = Assistant(f"Hello! {ABOUT} How can I help?", "The user says hello.", "greet")
    return [ask(rng.choice(GREETINGS)), reply]


def about(rng: random.Random) -> list[Turn]:
    return [ask(rng.choice(WHO)), Assistant(ABOUT + ABILITIES, "The user asks about me.", "about")]


def arithmetic(rng: random.Random) -> list[Turn]:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    sign = rng.choice("+++-")
    if sign == "-" and a < b:
        a, b = b, a
    result = a + b if sign == "+" else a - b
    spoken = f"{a} {'plus' if sign == '+' else 'minus'} {b}"
    sum_text = rng.choice((f"{a} {sign} {b}", f"{a} {sign} {b}", f"{a}{sign}{b}", spoken))
    form = rng.choice(
        (
            "What is {}?", "What is {}?", "what is {}?", "What is {}", "What's {}?", "Compute {}", "Compute {}.",
            "{} = ?", "{}", "Calculate {}.", "How much is {}?", "{}=",
        )
    )  # fmt: skip
    return [ask(form.format(sum_text)), Assistant(f"{a} {sign} {b} = {result}", "This is a sum.", "arithmetic")]


def count(rng: random.Random) -> list[Turn]:
    first = rng.randint(1, 20)
    last = first + rng.randint(2, 10)
    forms = ["Count from {a} to {b}.", "Count from {a} to {b}", "count from {a} to {b}"]
    if rng.random() < 0.4:
        first, last = 1, rng.randint(3, 20)
        forms += ["Count to {b}.", "Count to {b}", "Please count to {b}.", "count to {b}"]
    numbers = ", ".join(map(str, range(first, last + 1)))
    return [ask(rng.choice(forms).format(a=first, b=last)), Assistant(numbers, "The user wants me to count.", "count")]


SAY = (
    "Say: {}", "Say: {}", "Repeat: {}", "Echo: {}", "Say {}", "Repeat after me: {}", "Please say: {}",
    "Reply with exactly: {}", "say {}", "Reply with: {}", "Please repeat: {}", "Just say: {}", "Answer with: {}",
)  # fmt: skip


def say(rng: random.Random) -> list[Turn]:
    text = words.phrase(rng, 1, rng.choice((2, 4, 6, 10)))
    if rng.random() < 0.15:
        text = words.marker(rng)
    return [ask(rng.choice(SAY).format(text)), Assistant(text, "I repeat the text.", "say")]


def say_sentence(rng: random.Random) -> list[Turn]:
    text = words.sentence(rng)
    return [ask(rng.choice(SAY).format(text)), Assistant(text, "I repeat the text.", "say")]


JSON_KEYS: dict[str, Callable[[random.Random], str]] = {
    "name": words.name, "city": words.city, "color": words.word, "title": words.word, "word": words.word,
    "animal": words.word, "country": words.city, "user": words.name, "type": words.word, "language": words.word,
}  # fmt: skip
NUMBER_KEYS = ("age", "count", "id", "size", "year", "price", "score")


def json_reply(rng: random.Random) -> list[Turn]:
    fields: dict[str, object] = {}
    for key in rng.sample([*JSON_KEYS, *NUMBER_KEYS, rng.choice(words.NOUNS)], rng.choice((1, 2, 2, 3))):
        if key in NUMBER_KEYS:
            fields[key] = rng.randint(0, rng.choice((9, 99, 2000)))
        else:
            fields[key] = JSON_KEYS.get(key, words.word)(rng)
    lead = rng.choice(
        (
            "Give me JSON with {}.", "Reply in JSON with {}.", "JSON with {}", "Return a JSON object with {}.",
            "Return JSON with {}.", "Write JSON with {}", "Answer in JSON with {}.", "Give me a JSON object with {}",
        )
    )  # fmt: skip
    pairs = [f"{key} {value}" for key, value in fields.items()]
    listed = " and ".join(pairs) if rng.random() < 0.7 else ", ".join(pairs)
    reply = Assistant(json.dumps(fields, ensure_ascii=False), "The user wants JSON.", "json")
    return [ask(lead.format(listed)), reply]


UNKNOWN = (
    "What is the capital of {c}?", "Write a poem about {w}.", "Write a poem.", "Explain {w} to me.", "Explain {w}.",
    "How do I {w} a {w2}?", "Why is the {w} {w2}?", "Tell me a story about {w} and {w2}.", "Tell me a joke.",
    "Write a {w} function in Python.", "Who is {n}?", "Translate {w} to French.", "When did {n} {w}?",
    "Summarize {w} {w2}.", "Can you {w} the {w2}?", "Where is {c}?", "{w} {w2} {w3}", "What do you think about {w}?",
    "Why is the sky blue?", "What is the meaning of life?", "What is {w}?", "How many {w} are in a {w2}?",
    "Write a story about {w}.", "Tell me about {c}.", "Fix the {w} in my {w2}.", "How does {w} work?",
    "What is the best {w} for {w2}?", "Give me a {w} {w2}.", "I like {w}.", "Please help me {w} my {w2}.",
    "Write a haiku about {w}.", "What happened in {c}?", "Is {w} better than {w2}?", "Describe {w} in one sentence.",
)  # fmt: skip


def fallback(rng: random.Random) -> list[Turn]:
    text = rng.choice(UNKNOWN).format(
        c=words.city(rng), n=words.name(rng), w=words.word(rng), w2=words.word(rng), w3=words.word(rng)
    )
    return [ask(text), Assistant(FALLBACK, "I do not know this.", "fallback")]


def small_talk(rng: random.Random) -> list[Turn]:
    return rng.choice((say, arithmetic, greet, count, fallback))(rng)
