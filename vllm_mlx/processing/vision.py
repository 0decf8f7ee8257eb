"""What a checkpoint shows its model of pictures and videos, those of late kept. Knows no conversation."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InvalidImage
from ..core.sequence import MediaItem, PromptInputs
from .images.picture import Picture
from .images.renderer import ImageRenderer
from .model_processor import REFUSALS, WAYS, ModelProcessor, first_line, load_library_processor, unusable
from .rendition import Rendition
from .tokenizer import Tokenizer
from .videos.clip import Clip
from .videos.renderer import VideoRenderer
from .videos.sampling import FrameSampling

_Key = tuple[bytes, int | None]  # digest of a picture or a clip, and the longest side that is shown
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id")  # names in config.json
_MARKERS = ("image_token", "boi_token")  # names of a processor's attributes
_MIDDLE_PIXELS = 512 * 512  # of the larger image that a tower is measured with


@dataclass(frozen=True, slots=True, eq=False)
class VisionProbe:
    """What a loaded model is tried with."""

    prompt: PromptInputs  # with two images, each made by itself
    inputs: Mapping[str, np.ndarray]  # tensors that the processor makes of both at once
    sizes: tuple[PromptInputs, PromptInputs]  # a small and a larger image, each alone
    max_image_tokens: int  # of one image


class VisionProcessor:
    """Safe to share between threads. Pictures shown lately are kept with their tensors, up to `keep_bytes`."""

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
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Rendition] = OrderedDict()
        self._kept_bytes = 0
        self.keep_bytes = 0

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

    def show(self, picture: Picture, max_side: int | None = None) -> Rendition:
        """`max_side`: of the picture as shown, in pixels. Raises InvalidImage where the processor refuses it."""
        what = f"{picture.width} x {picture.height} pixels"
        return self._shown((picture.digest, max_side), lambda: self._images.render(picture, max_side), what)

    def show_clip(self, clip: Clip) -> Rendition:
        """For a model that is shown videos. Raises InvalidImage where the processor refuses it."""
        assert self._videos is not None, "videos are refused before they are decoded"
        videos, what = self._videos, f"{len(clip)} frames of {clip.width} x {clip.height} pixels"
        return self._shown((clip.digest, None), lambda: videos.render(clip), what)

    def _shown(self, key: _Key, render: Callable[[], Rendition], what: str) -> Rendition:
        with self._lock:  # processors and their tokenizers are not made for several threads
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            try:
                rendition = render()
            except REFUSALS as error:
                raise InvalidImage(f"the model's processor cannot take its {what}: {first_line(error)}") from error
            self._keep(key, rendition)
            return rendition

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

    def _keep(self, key: _Key, rendition: Rendition) -> None:
        self._kept[key] = rendition
        self._kept_bytes += rendition.nbytes
        while self._kept and self._kept_bytes > self.keep_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes


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
