"""Skills with pictures: colour and shape of one, two or three, words before or after them."""

import random

from . import text_skills
from .chat import Assistant, System, Turn, User, ask
from .pictures import Picture, picture

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
    source = rng.choice((text_skills.say, text_skills.arithmetic, text_skills.greet, text_skills.count))
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


def chat(rng: random.Random) -> list[Turn]:
    """Pictures in one or two turns, at times with plain talk before or after."""
    turns = look(rng)
    kind = rng.random()
    if kind < 0.15:
        turns += one(rng)
    elif kind < 0.28:
        turns += text_skills.small_talk(rng)
    elif kind < 0.4:
        turns = text_skills.small_talk(rng) + turns
    if rng.random() < 0.12:
        turns.insert(0, System("You are a helpful assistant."))
    return turns


def pictures(rng: random.Random) -> list[Turn]:
    """Two or three pictures at a time, once or twice."""
    return [turn for _ in range(rng.choice((1, 1, 2))) for turn in several(rng, rng.choice((2, 3, 3)))]
