"""A vision checkpoint with pictures drawn here, its prompts, and mlx-vlm's own reply to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.engine_driver import Driver
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import ImagePart, MediaPart, Message, ShownPart, TextPart, VideoPart
from vllm_mlx.core.request import Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.media.decode import Clip, Decoded, DecodedImage
from vllm_mlx.media.vision import VisionProbe, VisionProcessor
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model


@dataclass(frozen=True)
class Shot:
    """A video of noise, of another size for every third number."""

    number: int
    num_frames: int = 4

    @property
    def clip(self) -> Clip:
        frames = [picture(self.number + 3 * index).pixels for index in range(self.num_frames)]
        # At this rate, Qwen2.5's positions in time are those of mlx-vlm, which always counts one by one.
        return Clip(np.stack(frames), tuple(index / 4 for index in range(self.num_frames)), fps=4.0)


Content = Sequence[str | int | Shot]  # texts, numbers of pictures, and videos


def picture(number: int) -> DecodedImage:
    """Of another size for every third number."""
    height, width = ((96, 160), (128, 96), (110, 130))[number % 3]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3))
    return DecodedImage(noise.astype(np.uint8))


@dataclass
class VisionModel:
    path: Path
    max_pixels: int = 1 << 20

    def __post_init__(self) -> None:
        checkpoint = find_checkpoint(str(self.path))
        tokenizer = Tokenizer.load(self.path)
        self.vision = VisionProcessor.load(self.path, checkpoint.config, tokenizer, max_pixels=self.max_pixels)
        config = EngineConfig(model=str(self.path))
        self.processor = RequestProcessor(
            tokenizer,
            config,
            self.path,
            formats=reply_formats(config, tokenizer),
            max_model_len=8192,
            vocab_size=1024,
            vision=self.vision,
        )
        self._library: tuple[object, object] | None = None

    def driver(self, **settings: object) -> Driver:
        return Driver(self.path, probe=self._probe, **settings)

    def tight_bytes(self, prompts: Sequence[PromptInputs], max_tokens: int) -> int:
        """Of live rows, so that three of the prompts may begin and only two can end without one being preempted."""
        loaded = load_model(find_checkpoint(str(self.path)), trust_remote_code=False)
        bytes_at, longest = loaded.footprint.bytes_at, max(len(prompt.token_ids) for prompt in prompts)
        return 2 * bytes_at(longest + 10) + bytes_at(longest + max_tokens)

    @cached_property
    def _probe(self) -> VisionProbe:
        return self.vision.probe()

    def request(self, *turns: Content) -> Request:
        """A conversation; the user and the model take turns, the user begins."""
        messages = tuple(
            Message("user" if index % 2 == 0 else "assistant", tuple(map(_part, turn)))
            for index, turn in enumerate(turns)
        )
        return Request(request_id="r", messages=messages)

    def prompt(self, *turns: Content) -> PromptInputs:
        """With its tensors, which stay."""
        request, decoded = self.request(*turns), decoded_media(turns)
        rendered = {part: self.vision.render_with_inputs(decoded[part]) for part in self.processor.media_of(request)}
        return self.processor.prepare(request, rendered).prompt

    def reply(self, *turns: Content, max_tokens: int = 10) -> list[int]:
        """What mlx-vlm's own single stream says, from its own processor's inputs."""
        from mlx_vlm.generate.ar import generate_step

        inputs = self.reference_inputs(*turns)
        model, _ = self._loaded()
        ids, pixels, mask = inputs.pop("input_ids"), inputs.pop("pixel_values", None), inputs.pop("attention_mask")
        steps = generate_step(
            ids, model, pixels, mask, max_tokens=max_tokens, temperature=0.0, prefill_step_size=None, **inputs
        )
        return [int(token) for token, _ in steps]

    def reference_inputs(self, *turns: Content) -> dict[str, Any]:
        from mlx_vlm.utils import prepare_inputs

        _, processor = self._loaded()
        content = [[_library_part(part) for part in turn] for turn in turns]
        messages = [{"role": ("user", "assistant")[i % 2], "content": parts} for i, parts in enumerate(content)]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.fromarray(picture(part).pixels) for turn in turns for part in turn if isinstance(part, int)]
        clips = [part.clip for turn in turns for part in turn if isinstance(part, Shot)]
        videos = {"videos": [clip.pixels for clip in clips], "fps": [clip.fps for clip in clips]} if clips else {}
        try:
            return prepare_inputs(processor, images=images or None, prompts=[text], add_special_tokens=False, **videos)
        except ValueError:  # its own way in has options that not all of its processors take
            return dict(processor(text=[text], images=images))

    def _loaded(self) -> tuple[Any, Any]:
        from mlx_vlm.utils import load_model, load_processor

        if self._library is None:
            self._library = load_model(self.path), load_processor(self.path)
        return self._library


def decoded_media(turns: Sequence[Content]) -> dict[MediaPart, Decoded]:
    parts = [part for turn in turns for part in turn]
    images: dict[MediaPart, Decoded] = {_part(part): picture(part) for part in parts if isinstance(part, int)}
    return {**images, **{_part(part): part.clip for part in parts if isinstance(part, Shot)}}


def _part(part: str | int | Shot) -> ShownPart:
    match part:
        case str():
            return TextPart(part)
        case int():
            return ImagePart(f"picture {part}")
        case Shot(number, num_frames):
            return VideoPart(f"video {number} of {num_frames}")


def _library_part(part: str | int | Shot) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, int) else "video"}


def full(name: str) -> Any:
    """A family whose turn comes in the long run only."""
    return pytest.param(name, marks=pytest.mark.full)
