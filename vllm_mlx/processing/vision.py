"""What a checkpoint shows its model of pictures and videos, those of late kept. Knows no conversation."""

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InvalidImage
from ..core.sequence import MediaItem, PromptInputs
from .images.picture import Picture, Seen
from .images.renderer import ImageRenderer
from .model_processor import REFUSALS, WAYS, ModelProcessor, first_line, load_library_processor, unusable
from .rendition import Rendition
from .renditions import Renditions
from .tensors import Piece, TensorRoom, Tensors
from .tokenizer import Tokenizer
from .videos.clip import Clip
from .videos.renderer import VideoRenderer
from .videos.sampling import FrameSampling

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id")  # names in config.json
_MARKERS = ("image_token", "boi_token")  # names of a processor's attributes
_KNOWN_BYTES = 64 << 20  # a full-HD picture stands for some 50 kB
_MIDDLE_PIXELS = 512 * 512  # of the larger image that a tower is measured with


@dataclass(frozen=True, slots=True, eq=False)
class VisionProbe:
    """What a loaded model is tried with."""

    prompt: PromptInputs  # with two images, each made by itself
    inputs: Mapping[str, np.ndarray]  # tensors that the processor makes of both at once
    sizes: tuple[PromptInputs, PromptInputs]  # a small and a larger image, each alone
    max_image_tokens: int  # of one image


class PixelsNeeded(Exception):
    """What was seen before is not known any more, or not in this size: it has to be decoded again."""


class VisionProcessor:
    """Safe to share between threads. What pictures shown lately stand for is known, without their tensors."""

    def __init__(
        self,
        path: Path,
        processor: ModelProcessor,
        tokenizer: Tokenizer,
        images: ImageRenderer,
        videos: VideoRenderer | None = None,
        *,
        max_pixels: int,
    ):
        """`videos`: None for a model that is shown none."""
        self._path = path
        self._processor = processor
        self._tokenizer = tokenizer
        self._images = images
        self._videos = videos
        self._max_pixels = max_pixels
        self._lock = threading.Lock()  # processors and their tokenizers are not made for several threads
        self._known = Renditions(max_bytes=_KNOWN_BYTES)
        self.room = TensorRoom()

    @classmethod
    def load(
        cls,
        path: Path,
        config: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        max_pixels: int,
        trust_remote_code: bool = False,
    ) -> "VisionProcessor":
        """Raises ModelLoadError where the checkpoint's images cannot be shown to it."""
        library = load_library_processor(path, config, trust_remote_code=trust_remote_code)
        token_id = _image_token_id(path, config)
        merge_size = int(config["vision_config"].get("spatial_merge_size") or 1)
        markers = [str(getattr(library, name)) for name in _MARKERS if getattr(library, name, None)]
        for marker, options in itertools.product(markers, WAYS):
            processor = ModelProcessor(library, tokenizer, options)
            images = ImageRenderer(
                processor, tokenizer, token_id=token_id, marker=marker, merge_size=merge_size, max_pixels=max_pixels
            )
            if images.works(_sample(0)):
                videos = VideoRenderer.find(processor, tokenizer, config, max_pixels=max_pixels)
                return cls(path, processor, tokenizer, images, videos, max_pixels=max_pixels)
        raise unusable(path, "its processor does not write one image at a time")

    @property
    def marker(self) -> str:
        """What a chat template writes for an image."""
        return self._images.marker

    @property
    def video_marker(self) -> str | None:
        """None for a model that is shown no videos."""
        return None if self._videos is None else self._videos.marker

    @property
    def frame_sampling(self) -> FrameSampling | None:
        return None if self._videos is None else self._videos.sampling

    def render(self, medium: Picture | Clip, max_side: int | None = None) -> Rendition:
        """`max_side`: of a picture as shown, in pixels. Raises InvalidImage where the processor refuses it."""
        with self._lock:
            return self._render(medium, max_side)

    def show(
        self,
        medium: Picture | Clip | Seen,
        max_side: int | None = None,
        *,
        salt: str,
        remake: Callable[[Tensors], None],
    ) -> Rendition:
        """The same, with tensors that need not stay. Raises PixelsNeeded where they cannot be done without."""
        key, made = (salt, medium.digest, max_side), None
        with self._lock:
            known = self._known.get(key)
            if known is None:
                if isinstance(medium, Seen):
                    raise PixelsNeeded
                known = made = self._render(medium, max_side)
                self._known.put(key, made)
        tensors = Tensors(known.digest, self.room, remake)
        if made is not None:
            tensors.offer(made.pieces)
        return known.with_inputs(Piece(tensors, index) for index in range(len(known.media)))

    def _render(self, medium: Picture | Clip, max_side: int | None) -> Rendition:
        what = f"{medium.width} x {medium.height} pixels"
        try:
            if isinstance(medium, Picture):
                return self._images.render(medium, max_side)
            what = f"{len(medium)} frames of {what}"
            assert self._videos is not None, "videos are refused before they are decoded"
            return self._videos.render(medium)
        except REFUSALS as error:
            raise InvalidImage(f"the model's processor cannot take its {what}: {first_line(error)}") from error

    def probe(self) -> VisionProbe:
        """Raises ModelLoadError where the chat template does not show images."""
        pictures = [_sample(seed) for seed in (1, 2)]
        text = self._probe_text()
        with self._lock:
            shown = [self._images.fit(picture) for picture in pictures]
            ids, inputs = self._processor.run(text, images=shown, keep_all=True)
            renditions = [self._images.render(picture) for picture in pictures]
            middle = self._images.render(_plain(min(self._max_pixels, _MIDDLE_PIXELS)))
            largest = self._images.render(_plain(self._max_pixels))
        prompt = PromptInputs(token_ids=tuple(ids), media=self._found(ids, renditions))
        return VisionProbe(prompt, inputs, (renditions[0].alone(), middle.alone()), len(largest.token_ids))

    def _found(self, ids: list[int], renditions: list[Rendition]) -> tuple[MediaItem, ...]:
        items: list[MediaItem] = []
        for rendition in renditions:
            items += rendition.placed(ids.index(self._images.token_id, items[-1].end if items else 0))
        return tuple(items)

    def _probe_text(self) -> str:
        image = {"type": "image"}
        content = [{"type": "text", "text": "one"}, image, {"type": "text", "text": "two"}, image]
        messages = [{"role": "user", "content": content}]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        except Exception as error:  # a template is a program
            raise unusable(self._path, f"its chat template fails on one: {first_line(error)}") from error
        if text.count(self.marker) != 2:
            raise unusable(self._path, f"its chat template shows no {self.marker} for one")
        return text


def _image_token_id(path: Path, config: Mapping[str, Any]) -> int:
    for name in _IMAGE_TOKENS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise unusable(path, f"config.json names no {_IMAGE_TOKENS[0]}")


def _sample(seed: int) -> Picture:
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (96, 160, 3)).astype(np.uint8))


def _plain(num_pixels: int) -> Picture:
    side = max(1, int(num_pixels**0.5))
    return Picture.of(np.zeros((side, side, 3), np.uint8))
