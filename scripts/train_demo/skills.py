"""Skills of a chat: greeting, sums, counting, saying, JSON, the way out; facts near and far; pictures."""

import json
import random
from collections.abc import Callable

from . import words
from .chat import Assistant, Picture, System, Turn, User, ask, picture

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


def sums(rng: random.Random) -> list[Turn]:
    """Ask for sums alone: there are few, and each must be learned by heart."""
    return [turn for _ in range(8) for turn in arithmetic(rng)]


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


def said(rng: random.Random, text: str) -> list[Turn]:
    return [ask(rng.choice(SAY).format(text)), Assistant(text, "I repeat the text.", "say")]


def say(rng: random.Random) -> list[Turn]:
    text = words.phrase(rng, 1, rng.choice((2, 4, 6, 10)))
    if rng.random() < 0.15:
        text = words.marker(rng)
    return said(rng, text)


def sayings(rng: random.Random) -> list[Turn]:
    """Ask to repeat sentences, with the small words that the other skills leave out."""
    return [turn for _ in range(rng.randint(2, 5)) for turn in said(rng, words.sentence(rng))]


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


def asked_for(rng: random.Random, label: str, value: str, skill: str, owner: str = "my") -> list[Turn]:
    forms = (
        "What is {} {}?", "What is {} {}?", "What is {} {}?", "Tell me {} {}.", "what is {} {}?", "What was {} {}?",
    )  # fmt: skip
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
        turns += asked_for(rng, label, value, "recall")
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
        sheet = f"{rng.choice(words.OPENINGS)} {sheet}"
    turns: list[Turn] = [System(sheet)]
    if rng.random() < 0.2:
        turns += small_talk(rng)
    for label, value in rng.sample(known, min(len(known), rng.choice((1, 2)))):
        turns += asked_for(rng, label, value, "recall_system", "the")
    return turns


def notes(rng: random.Random, size: int) -> list[Turn]:
    """Return a long text that the user pastes."""
    lead = rng.choice(("Here is some text:\n", "Here are my notes:\n", "Here is a long text:\n"))
    reply = Assistant("OK, I have read it.", "The user shows me a text.", "note")
    return [ask(lead + words.blocks(rng, size)), reply]


def recall_long(rng: random.Random, size: int | None = None) -> list[Turn]:
    """Facts, about `size` characters of something else, then several questions."""
    size = rng.choice((200, 500, 1000, 1800, 2800, 4200)) if size is None else size
    known = facts(rng, rng.choice((1, 2, 3)))
    asked = rng.sample(known, min(len(known), 3))
    if rng.random() < 0.4:
        parts = [fact_sheet(rng, known), words.blocks(rng, size)]
        if rng.random() < 0.3:
            parts.insert(0, words.blocks(rng, size // 3))
        turns: list[Turn] = [System("\n\n".join(parts))]
        owner = "the"
    else:
        turns = [t for label, value in known for t in tell(rng, label, value)]
        turns += notes(rng, size)
        owner = "my"
    if rng.random() < 0.3:
        turns += small_talk(rng)
    return turns + [t for label, value in asked for t in asked_for(rng, label, value, "recall_long", owner)]


def recall_near(rng: random.Random) -> list[Turn]:
    return recall_long(rng, rng.choice((100, 300, 600)))


DESCRIBE = (
    "Describe the image.", "What is in this image?", "What do you see?", "Describe this picture.", "What is this?",
    "Describe this image in one sentence.", "What is in the picture?", "What's in this image?", "Describe this image.",
    "what is this?", "Describe the picture.",
)  # fmt: skip
WHICH_COLOR = (
    "What color is it?", "What color is the shape?", "Which color?", "What color is this?", "Which color do you see?",
    "What colour is it?",
)  # fmt: skip
WHICH_SHAPE = ("What shape is it?", "Which shape is this?", "Which shape?", "What shape is this?")
DESCRIBE_MANY = (
    "Compare the images.", "Compare these images.", "What is in these images?", "Describe the images.",
    "What is the difference?", "Describe these pictures.", "What do you see?", "What is in the pictures?",
    "Describe each image.",
)  # fmt: skip
ORDINALS = ("first", "second", "third")
AMOUNTS = ("One picture.", "Two pictures.", "Three pictures.")

NO_IMAGE = "I do not see an image."


def no_image(rng: random.Random) -> list[Turn]:
    text = rng.choice(DESCRIBE + WHICH_COLOR + WHICH_SHAPE)
    return [ask(text), Assistant(NO_IMAGE, "There is no picture.", "no_image")]


def around(rng: random.Random, text: str, pictures: list[Picture]) -> User:
    """Return the text before the pictures or after them; at times a line on each side."""
    if rng.random() < 0.5:
        return User((*pictures, text))
    return User((text, *pictures))


def one(rng: random.Random) -> list[Turn]:
    seen = picture(rng)
    kind = rng.random()
    if kind < 0.6:
        text, reply = rng.choice(DESCRIBE), f"I see {seen.phrase()}."
    elif kind < 0.8:
        text, reply = rng.choice(WHICH_COLOR), f"It is {seen.color}."
    else:
        text, reply = rng.choice(WHICH_SHAPE), f"It is a {seen.shape}."
    return [around(rng, text, [seen]), Assistant(reply, AMOUNTS[0], "image")]


def several(rng: random.Random, amount: int) -> list[Turn]:
    seen = [picture(rng, small=True) for _ in range(amount)]
    listed = ", ".join(f"the {ORDINALS[i]} is {p.phrase()}" for i, p in enumerate(seen))
    reply = Assistant(f"T{listed[1:]}.", AMOUNTS[amount - 1], f"image{amount}")
    return [around(rng, rng.choice(DESCRIBE_MANY), seen), reply]


def beside(rng: random.Random) -> list[Turn]:
    """Return a question in words only, with a picture that does not matter."""
    source = rng.choice((say, arithmetic, greet, count))
    question, reply = source(rng)
    pictures = [picture(rng, small=True) for _ in range(rng.choice((1, 1, 2)))]
    return [around(rng, question.parts[0], pictures), Assistant(reply.text, reply.thought, "image_beside")]


def look(rng: random.Random) -> list[Turn]:
    kind = rng.random()
    if kind < 0.5:
        return one(rng)
    if kind < 0.7:
        return several(rng, 2)
    return several(rng, 3) if kind < 0.88 else beside(rng)


def look_and_talk(rng: random.Random) -> list[Turn]:
    """Pictures in one or two turns, at times with plain talk before or after."""
    turns = look(rng)
    kind = rng.random()
    if kind < 0.15:
        turns += one(rng)
    elif kind < 0.28:
        turns += small_talk(rng)
    elif kind < 0.4:
        turns = small_talk(rng) + turns
    if rng.random() < 0.12:
        turns.insert(0, System("You are a helpful assistant."))
    return turns


def pictures(rng: random.Random) -> list[Turn]:
    """Two or three pictures at a time, once or twice."""
    return [turn for _ in range(rng.choice((1, 1, 2))) for turn in several(rng, rng.choice((2, 3, 3)))]


SHORT = {
    greet: 1.0, about: 0.8, arithmetic: 3.5, say: 2.0, recall: 2.2, recall_system: 1.8, json_reply: 1.8, count: 1.0,
    fallback: 1.4, no_image: 0.4,
}  # fmt: skip
ONE_SHOT = {k: v for k, v in SHORT.items() if k not in (recall_system, recall)}


def talk(rng: random.Random) -> list[Turn]:
    """Draw one to three skills in a row; the system prompt, if any, comes first."""
    turns: list[Turn] = []
    for i in range(rng.randint(1, 3)):
        pool = SHORT if i == 0 else {**ONE_SHOT, recall: 2.0}
        turns += rng.choices(list(pool), list(pool.values()))[0](rng)
    if not isinstance(turns[0], System) and rng.random() < 0.25:
        turns.insert(0, System(rng.choice((*words.OPENINGS, "Be brief.", "You are Tiny."))))
    return turns
