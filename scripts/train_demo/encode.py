"""Conversations to token ids, labels and positions. Repeats the jinja template in Python; a check compares the two."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .chat import Assistant, Conversation, System, Tool, ToolResult, User, messages, reply_text
from .pictures import MERGE, Picture, patches

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
