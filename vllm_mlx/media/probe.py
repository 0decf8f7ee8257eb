"""Prompts with images and a clip made here, which test a vision model when it is loaded. Knows no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..core.errors import TemplateError, first_line
from ..core.sequence import MediaItem, PromptInputs
from ..tokens.tokenizer import TEMPLATE_FAILURES, Tokenizer
from .clip import Clip
from .hf_processor import FAULTS, MAX_REASON, ModelProcessor
from .image import DecodedImage
from .renderers import ImageRenderer, NoVideos, VideoRenderer

_HEIGHT, _WIDTH = 96, 160
_NUM_FRAMES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A prompt with media rendered one by one, and the encoder inputs that the processor makes of all at once."""

    prompt: PromptInputs
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class VisionProbe:
    images: Trial  # two images
    video: Trial | None  # one video in several pieces; None if the model takes no videos
    sizes: tuple[PromptInputs, PromptInputs]  # a small image alone, and a larger one alone
    max_image_tokens: int  # tokens of one image


def image_trial(text: str, processor: ModelProcessor, images: ImageRenderer) -> Trial:
    """`text` holds two markers. Raises one of `REFUSALS`."""
    noises = [noise(seed) for seed in (1, 2)]
    ids, inputs = processor.run(text, images=[images.fit(image) for image in noises], keep_all=True)
    items: list[MediaItem] = []
    for image in noises:
        items += images.render(image).placed(ids.index(images.token_id, items[-1].end if items else 0))
    return Trial(PromptInputs(token_ids=tuple(ids), media=tuple(items)), inputs)


def video_trial(tokenizer: Tokenizer, videos: VideoRenderer) -> Trial | NoVideos:
    try:
        text = trial_text(tokenizer, "video", 1)
    except (*TEMPLATE_FAILURES, TemplateError) as error:
        return NoVideos(f"the chat template fails on one: {first_line(error, MAX_REASON)}")
    if text.count(videos.marker) != 1:
        return NoVideos(f"the chat template shows no {videos.marker} for one")
    try:
        return _in_pieces(text, videos)
    except FAULTS as error:
        return NoVideos(f"the checkpoint's processor fails on one: {first_line(error, MAX_REASON)}")


def _in_pieces(text: str, videos: VideoRenderer) -> Trial:
    frames = np.stack([noise(seed).pixels for seed in range(_NUM_FRAMES)])
    clip = Clip.of(frames, [number / videos.even_fps for number in range(_NUM_FRAMES)], videos.even_fps)
    ids, inputs = videos.run(text, clip, keep_all=True)
    rendered = videos.render(clip, piece_pixels=1)
    start = ids.index(videos.token_id)
    if tuple(ids[start : start + len(rendered.token_ids)]) != rendered.token_ids:
        raise ValueError("it writes a video in another way beside text")
    return Trial(PromptInputs(token_ids=tuple(ids), media=rendered.placed(start)), inputs)


def trial_text(tokenizer: Tokenizer, kind: Literal["image", "video"], number: int) -> str:
    """A rendered conversation with `number` images or videos. Raises one of `TEMPLATE_FAILURES`, or TemplateError."""
    content = number * [{"type": "text", "text": "one"}, {"type": kind}]
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def noise(seed: int) -> DecodedImage:
    return DecodedImage.of(np.random.default_rng(seed).integers(0, 256, (_HEIGHT, _WIDTH, 3)).astype(np.uint8))


def plain(num_pixels: int) -> DecodedImage:
    side = max(1, int(num_pixels**0.5))
    return DecodedImage.of(np.zeros((side, side, 3), np.uint8))
