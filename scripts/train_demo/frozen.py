"""The frozen replies of the tests: asked of mlx-vlm, then confirmed token by token with torch."""

import json
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration

from .batches import collate, learned_logits
from .encode import Encoder, Segment
from .pictures import Picture, paint
from .scoring import Greedy
from .tokenizer import token_ids


def drawn(color: str, shape: str, side: int) -> Picture:
    """Return an image as the tests draw it: a shape of pure colour, in the middle, on white."""
    image = Image.new("RGB", (side, side), "white")
    paint(ImageDraw.Draw(image), shape, (side / 2, side / 2, side * 0.375), color)
    return Picture(image, color, shape)


class Torch:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.encoder = Encoder(self.tokenizer)
        self.pad_id = token_ids(self.tokenizer).text_end

    @torch.no_grad()
    def agrees(self, prompt: str, pictures: list[Picture], reply: str) -> bool:
        """Return whether greedy decoding would give just this reply and then end the turn."""
        parts = [Segment(prompt), Segment(f"{reply}<|im_end|>", learned=True)]
        logits, targets = learned_logits(self.model, collate([self.encoder.encode(parts, pictures)], self.pad_id))
        return bool((logits.argmax(-1) == targets).all())


def freeze(folder: Path, file: Path) -> None:
    """Answers the prompts in `file` anew and writes the replies into it; refuses where torch and MLX differ."""
    cases = json.loads(file.read_text())
    differing = []
    greedy, other = Greedy(folder), Torch(folder)
    for case in cases:
        pictures = [drawn(*described) for described in case["pictures"]]
        images = [p.image for p in pictures]
        reply, _ = greedy.complete(case["messages"], case["tools"], case["thinking"], images)
        prompt = other.tokenizer.apply_chat_template(
            case["messages"],
            tools=case["tools"],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=case["thinking"],
        )
        if not other.agrees(prompt, pictures, reply):
            differing.append(case["name"])
        changed = "" if case.get("reply") in (None, reply) else f"   (was {case['reply']!r})"
        print(f"{case['name']}: {reply!r}{changed}")
        case["reply"] = reply
    if differing:
        raise SystemExit(f"torch and MLX differ on: {', '.join(differing)}")
    file.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
