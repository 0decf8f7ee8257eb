"""A vision checkpoint with pictures drawn here, its prompts, and mlx-vlm's own reply to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import ImagePart, Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.processing.images.picture import Picture
from vllm_mlx.processing.processor import Processor
from vllm_mlx.processing.tokenizer import Tokenizer
from vllm_mlx.processing.vision import VisionProcessor
from vllm_mlx.runner.loader import find_checkpoint

from .harness import Driver

Content = Sequence[str | int]  # texts, and numbers of pictures


def picture(number: int) -> Picture:
    """Of another size for every third number."""
    height, width = ((96, 160), (128, 96), (110, 130))[number % 3]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3))
    return Picture.of(noise.astype(np.uint8))


@dataclass
class VisionModel:
    path: Path

    def __post_init__(self) -> None:
        checkpoint = find_checkpoint(str(self.path))
        tokenizer = Tokenizer.load(self.path)
        self.vision = VisionProcessor.load(self.path, checkpoint.config, tokenizer, max_pixels=1 << 20)
        self.processor = Processor(
            tokenizer,
            EngineConfig(model=str(self.path)),
            self.path,
            max_model_len=8192,
            vocab_size=1024,
            vision=self.vision,
        )
        self._library: tuple[object, object] | None = None

    def driver(self, **settings: object) -> Driver:
        return Driver(self.path, probe=self.vision.probe(), **settings)

    def request(self, *turns: Content) -> Request:
        """A conversation; the user and the model take turns, the user begins."""
        messages = tuple(
            Message("user" if index % 2 == 0 else "assistant", tuple(map(_part, turn)))
            for index, turn in enumerate(turns)
        )
        return Request(request_id="r", messages=messages)

    def prompt(self, *turns: Content) -> PromptInputs:
        return self.processor.prepare(self.request(*turns), pictures_of(turns)).prompt

    def reply(self, *turns: Content, max_tokens: int = 10) -> list[int]:
        """What mlx-vlm's own single stream says, from its own processor's inputs."""
        from mlx_vlm.generate.ar import generate_step
        from mlx_vlm.utils import load_model, load_processor, prepare_inputs

        if self._library is None:
            self._library = load_model(self.path), load_processor(self.path)
        model, processor = self._library
        content = [[{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in t] for t in turns]
        messages = [{"role": ("user", "assistant")[i % 2], "content": parts} for i, parts in enumerate(content)]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.fromarray(picture(part).pixels) for turn in turns for part in turn if isinstance(part, int)]
        try:
            inputs = prepare_inputs(processor, images=images or None, prompts=[text], add_special_tokens=False)
        except ValueError:  # its own way in has options that not all of its processors take
            inputs = dict(processor(text=[text], images=images))
        ids, pixels, mask = inputs.pop("input_ids"), inputs.pop("pixel_values", None), inputs.pop("attention_mask")
        steps = generate_step(
            ids, model, pixels, mask, max_tokens=max_tokens, temperature=0.0, prefill_step_size=None, **inputs
        )
        return [int(token) for token, _ in steps]


def pictures_of(turns: Sequence[Content]) -> Mapping[str | bytes, Picture]:
    return {f"picture {part}": picture(part) for turn in turns for part in turn if isinstance(part, int)}


def _part(part: str | int) -> TextPart | ImagePart:
    return TextPart(part) if isinstance(part, str) else ImagePart(f"picture {part}")
