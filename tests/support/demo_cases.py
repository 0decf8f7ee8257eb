"""Asks a checkpoint the frozen prompts through mlx-vlm itself, greedily. Knows nothing of our engine."""

import json
from dataclasses import dataclass
from pathlib import Path

from mlx_vlm import generate, load

from .shapes import draw_shape

MAX_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt and its exact reply: the reasoning, if it thinks, then the answer."""

    name: str
    thinking: bool
    messages: list[dict]
    tools: list[dict] | None
    pictures: list[tuple[str, str, int]]
    reply: str


def frozen_cases() -> list[Case]:
    return [Case(**fields) for fields in json.loads((Path(__file__).parents[1] / "demo" / "replies.json").read_text())]


class Asker:
    """One loaded checkpoint."""

    def __init__(self, folder: Path):
        self.model, self.processor = load(str(folder))

    def reply(self, case: Case) -> str:
        prompt = self.processor.tokenizer.apply_chat_template(
            case.messages, tools=case.tools, tokenize=False, add_generation_prompt=True, enable_thinking=case.thinking
        )
        images = [draw_shape(*described) for described in case.pictures] or None
        result = generate(self.model, self.processor, prompt, image=images, max_tokens=MAX_TOKENS, temperature=0.0)
        return result.text.removesuffix("<|im_end|>")


def answer(reply: str) -> str:
    """What stands after the reasoning."""
    return reply.rpartition("</think>")[2].strip()
