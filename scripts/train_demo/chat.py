"""Conversations as the generators make them: pictures in them, their texts, and their ids, labels and positions.

`segments` repeats the jinja template in Python; a check compares the two.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

COLORS = {
    "red": ((220, 30, 30), (255, 0, 0)),
    "green": ((30, 160, 50), (0, 128, 0)),
    "blue": ((40, 70, 220), (0, 0, 255)),
    "yellow": ((240, 215, 30), (255, 255, 0)),
    "purple": ((140, 40, 170), (128, 0, 128)),
    "orange": ((250, 135, 20), (255, 165, 0)),
}
SHAPES = ("circle", "square", "triangle", "star")
PATCH, MERGE = 16, 2
BACKGROUNDS = ((255, 255, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128))


@dataclass(frozen=True, slots=True)
class Picture:
    image: Image.Image
    color: str
    shape: str

    def phrase(self) -> str:
        """Return `a red circle`, `an orange star`."""
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape}"


def tint(rng: random.Random, color: str) -> tuple[int, int, int]:
    """Return a shade of the colour: half the time one of its exact values, else a near one."""
    base = rng.choice(COLORS[color])
    if rng.random() < 0.5:
        return base
    return tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in base)


def canvas(rng: random.Random, small: bool) -> tuple[int, int]:
    if small:
        return (rng.choice((64, 64, 96)),) * 2
    if rng.random() < 0.2:
        return rng.choice((64, 96, 128, 160)), rng.choice((64, 96, 128, 160))
    return (rng.choice((64, 64, 96, 128, 128, 160, 224)),) * 2


def star(cx: float, cy: float, r: float) -> list[tuple[float, float]]:
    points = []
    for k in range(10):
        radius = r if k % 2 == 0 else r * 0.42
        angle = -math.pi / 2 + k * math.pi / 5
        points.append((cx + radius * math.cos(angle), cy + radius * math.sin(angle)))
    return points


def paint(draw: ImageDraw.ImageDraw, shape: str, box: tuple[float, float, float], fill) -> None:
    cx, cy, r = box
    if shape == "circle":
        draw.ellipse([cx - r, cy - r, cx + r, cy + r], fill=fill)
    elif shape == "square":
        q = r * 0.88
        draw.rectangle([cx - q, cy - q, cx + q, cy + q], fill=fill)
    elif shape == "triangle":
        draw.polygon([(cx, cy - r), (cx - r * 0.95, cy + r * 0.8), (cx + r * 0.95, cy + r * 0.8)], fill=fill)
    else:
        draw.polygon(star(cx, cy, r), fill=fill)


def picture(rng: random.Random, *, small: bool = False) -> Picture:
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    width, height = canvas(rng, small)
    fill = tint(rng, color)
    if rng.random() < 0.04:  # a plain tile reads as a square
        return Picture(Image.new("RGB", (width, height), fill), color, "square")
    ground = rng.choice((*BACKGROUNDS, (rng.randint(200, 255),) * 3))
    image = Image.new("RGB", (width, height), ground)
    side = min(width, height)
    r = rng.uniform(0.22, 0.46) * side
    cx, cy = rng.uniform(r, width - r), rng.uniform(r, height - r)
    if rng.random() < 0.4:
        cx, cy = width / 2, height / 2
    paint(ImageDraw.Draw(image), shape, (cx, cy, r), fill)
    return Picture(image, color, shape)


def patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """(patches, 3*2*16*16) float32 and the grid (t, h, w), as the Qwen-VL image processor gives them.

    Sides must be multiples of 32, so that no resizing is due.
    """
    pixels = (np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 - 0.5) / 0.5
    channels, height, width = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    frames = np.stack([pixels, pixels])
    blocks = frames.reshape(1, 2, channels, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH).transpose(
        0, 3, 6, 4, 7, 2, 1, 5, 8
    )
    flat = blocks.reshape(rows * columns, channels * 2 * PATCH * PATCH)
    return np.ascontiguousarray(flat), (1, rows, columns)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class System:
    text: str


@dataclass(frozen=True, slots=True)
class User:
    """`parts` holds text and pictures in the order they are sent."""

    parts: tuple[str | Picture, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str


@dataclass(frozen=True, slots=True)
class Assistant:
    """A reply. The turn is scored under `skill`."""

    text: str
    thought: str
    skill: str
    calls: tuple[Call, ...] = ()


Turn = System | User | ToolResult | Assistant


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. `schema` maps each parameter to its JSON schema, `required` keeps their order."""

    name: str
    description: str
    schema: dict[str, dict]
    required: tuple[str, ...]

    def wire(self) -> dict:
        parameters = {"type": "object", "properties": self.schema, "required": list(self.required)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = field(default=())

    def replies(self) -> Iterator[tuple[int, Assistant]]:
        return ((i, t) for i, t in enumerate(self.turns) if isinstance(t, Assistant))


def ask(text: str) -> User:
    return User((text,))


def value_text(value: object) -> str:
    """Return how the wire format writes an argument: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def call_text(call: Call) -> str:
    arguments = "".join(f"<parameter={k}>\n{value_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{arguments}</function>\n</tool_call>"


def reply_text(turn: Assistant) -> str:
    """Everything after the reasoning."""
    calls = "\n".join(call_text(c) for c in turn.calls)
    return turn.text + ("\n\n" if turn.text and calls else "") + calls


def messages(turns: tuple[Turn, ...]) -> list[dict]:
    """Return the turns as OpenAI messages, the way a chat template wants them."""
    return [message(turn) for turn in turns]


def message(turn: Turn) -> dict:
    match turn:
        case System(text):
            return {"role": "system", "content": text}
        case User(parts):
            if len(parts) == 1 and isinstance(parts[0], str):
                return {"role": "user", "content": parts[0]}
            content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
            return {"role": "user", "content": content}
        case ToolResult(text):
            return {"role": "tool", "content": text}
        case Assistant(text, thought, _, calls):
            result = {"role": "assistant", "content": text, "reasoning_content": thought}
            if calls:
                result["tool_calls"] = [
                    {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
                ]
            return result


IGNORED = -100
IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
CALL_HELP = (
    "\n</tools>\nCall a tool like this:\n<tool_call>\n<function=NAME>\n<parameter=ARG>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>"
)
ThinkAt = Callable[[int], bool]  # does the reply at this turn think?
WITH_THOUGHT: ThinkAt = lambda turn: True  # noqa: E731
NO_THOUGHT: ThinkAt = lambda turn: False  # noqa: E731


@dataclass(frozen=True, slots=True)
class Segment:
    """Text to encode on its own; `learned` where the model is to predict it."""

    text: str
    learned: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. positions: (tokens, 3) as mRoPE counts them; pixels and grids in the order of the pictures."""

    ids: list[int]
    labels: list[int]
    positions: list[tuple[int, int, int]]
    pixels: list[np.ndarray]
    grids: list[tuple[int, int, int]]


def tool_text(tool: Tool) -> str:
    required = "".join(f"<parameter={name}>\n" for name in tool.required)
    parameters = json.dumps(tool.wire()["function"]["parameters"], ensure_ascii=False)
    return f"\n<function={tool.name}>\n{required}</function>\n{tool.description}\n{parameters}"


def opening(conversation: Conversation) -> str:
    """Return the first system turn: tools, then the system prompt."""
    head = "".join(map(tool_text, conversation.tools))
    first = conversation.turns[0]
    prompt = first.text.strip() if isinstance(first, System) else ""
    if conversation.tools:
        listing = f"# Tools\n<tools>{head}{CALL_HELP}"
        return f"<|im_start|>system\n{listing}" + (f"\n\n{prompt}" if prompt else "") + "<|im_end|>\n"
    return f"<|im_start|>system\n{prompt}<|im_end|>\n" if prompt else ""


def user_text(turn: User) -> str:
    """Write numbers before several images, each on a line of its own."""
    numbered = sum(isinstance(p, Picture) for p in turn.parts) > 1
    text, number = "", 0
    for part in turn.parts:
        if isinstance(part, Picture):
            number += 1
            text += (f"\nPicture {number}: " if numbered else "") + IMAGE_MARK
        else:
            text += part
    return text.strip()


def reply_segments(turn: Assistant, *, block: bool, thinks: bool) -> Iterator[Segment]:
    """`block`: the turn shows its think block, as all after the last question do."""
    reply = Segment(reply_text(turn) + "<|im_end|>", learned=True)
    if not block:
        yield Segment("<|im_start|>assistant\n")
        yield reply
    elif thinks:
        yield Segment("<|im_start|>assistant\n<think>\n")
        yield Segment(f"{turn.thought}\n</think>\n\n{reply.text}", learned=True)
    else:
        yield Segment("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        yield reply
    yield Segment("\n")


def segments(conversation: Conversation, thinks: ThinkAt, *, all_blocks: bool = False) -> Iterator[Segment]:
    """Yield the segments of a conversation. `all_blocks` shows the reasoning of every reply, unlike the template."""
    turns = conversation.turns
    last_user = max((i for i, t in enumerate(turns) if isinstance(t, User)), default=-1)
    if text := opening(conversation):
        yield Segment(text)
    for i, turn in enumerate(turns):
        match turn:
            case System(text) if i:
                yield Segment(f"<|im_start|>system\n{text.strip()}<|im_end|>\n")
            case User():
                yield Segment(f"<|im_start|>user\n{user_text(turn)}<|im_end|>\n")
            case ToolResult(text):
                starts = not isinstance(turns[i - 1], ToolResult)
                ends = i + 1 == len(turns) or not isinstance(turns[i + 1], ToolResult)
                body = f"\n<tool_response>\n{text.strip()}\n</tool_response>"
                yield Segment("<|im_start|>user" * starts + body + "<|im_end|>\n" * ends)
            case Assistant():
                yield from reply_segments(turn, block=all_blocks or i > last_user, thinks=thinks(i))


class Encoder:
    """Turns conversations into examples with one tokenizer."""

    def __init__(self, tokenizer):
        self.backend = tokenizer.backend_tokenizer
        self.image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def example(self, conversation: Conversation, thinks: ThinkAt, *, all_blocks: bool) -> Example:
        seen = [p for t in conversation.turns if isinstance(t, User) for p in t.parts if isinstance(p, Picture)]
        return self.encode(segments(conversation, thinks, all_blocks=all_blocks), seen)

    def encode(self, parts: Iterable[Segment], seen: Iterable[Picture]) -> Example:
        """`seen` has a picture for each image mark in the text."""
        pictures = iter(seen)
        result = Example([], [], [], [], [])
        place = 0
        for part in parts:
            for token in self.ids(part.text):
                if token == self.image_id:
                    place = self.add_picture(result, next(pictures), place)
                    continue
                result.ids.append(token)
                result.labels.append(token if part.learned else IGNORED)
                result.positions.append((place, place, place))
                place += 1
        return result

    def add_picture(self, example: Example, picture: Picture, place: int) -> int:
        """Append its tokens and return the next position: text goes on after the longer side."""
        pixels, grid = patches(picture.image)
        rows, columns = grid[1] // MERGE, grid[2] // MERGE
        example.pixels.append(pixels)
        example.grids.append(grid)
        example.ids.extend([self.image_id] * (rows * columns))
        example.labels.extend([IGNORED] * (rows * columns))
        example.positions.extend((place, place + i // columns, place + i % columns) for i in range(rows * columns))
        return place + max(rows, columns)


def check_template(tokenizer, conversations: list[Conversation]) -> None:
    """Raise if the chat template does not write the same text as `segments`, with and without reasoning."""
    for conversation in conversations:
        wire = messages(conversation.turns)
        tools = [t.wire() for t in conversation.tools] or None
        told = tokenizer.apply_chat_template(wire, tools=tools, tokenize=False)
        ours = "".join(s.text for s in segments(conversation, WITH_THOUGHT))
        assert told == ours, f"the template differs:\n{told!r}\n{ours!r}"
