"""Turns images and videos into text, token ids and encoder inputs for one checkpoint. Knows no conversation."""

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ..core.config import PROBE_PIXELS
from ..core.errors import InvalidImage, TemplateError, first_line
from ..core.memory import ByteRoom, MemoryBudget
from ..core.messages import ImagePart, MediaPart
from ..core.sequence import MediaItem, PromptInputs
from ..formats.tokenizer import TEMPLATE_FAILURES, Tokenizer
from ..util.lru import LRU
from .decode import Clip, Decoded, DecodedImage
from .rendered import Arrays, ItemInputs, MediaInputs, RenderedMedia
from .renderers import (
    FAULTS,
    MAX_REASON,
    REFUSALS,
    WAYS,
    ImageRenderer,
    ModelProcessor,
    VideoRenderer,
    load_library_processor,
    unusable,
)
from .video import FrameSampling

logger = logging.getLogger(__name__)

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id")  # names in config.json
_MARKERS = ("image_token", "boi_token")  # names of a processor's attributes
Key = tuple[bytes, int | None]  # the content of a file, and the `max_side` of an image
_HEIGHT, _WIDTH = 96, 160  # pixels of a test image
_NUM_FRAMES = 4


class Owner(Protocol):
    """The owner of rendered media, who can have a part rendered again."""

    def start_again(self, part: MediaPart, digest: bytes) -> "Future[RenderedMedia]":
        """Start to render a part on other threads. `digest`: that of its first rendering."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A prompt with media rendered one by one, and the encoder inputs that the processor computes for all together."""

    prompt: PromptInputs
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class VisionProbe:
    images: Trial  # two images
    video: Trial | None  # one video in several pieces; None if the model takes no videos
    sizes: tuple[PromptInputs, PromptInputs]  # a small image alone, and a larger one alone
    max_image_tokens: int  # tokens of one image


def image_trial(text: str, processor: ModelProcessor, images: ImageRenderer) -> Trial:
    """Render two images in `text`, which has two markers. Raises one of `REFUSALS`."""
    noises = [noise(seed) for seed in (1, 2)]
    ids, inputs = processor.run(text, images=[images.fit(image) for image in noises], keep_all=True)
    items: list[MediaItem] = []
    for image in noises:
        items += images.render(image).placed(ids.index(images.token_id, items[-1].end if items else 0))
    return Trial(PromptInputs(token_ids=tuple(ids), media=tuple(items)), inputs)


def _in_pieces(text: str, videos: VideoRenderer) -> Trial:
    frames = np.stack([noise(seed).pixels for seed in range(_NUM_FRAMES)])
    clip = Clip(frames, tuple(number / videos.even_fps for number in range(_NUM_FRAMES)), videos.even_fps)
    ids, inputs = videos.run(text, clip, keep_all=True)
    rendered = videos.render(clip, piece_pixels=1)
    start = ids.index(videos.token_id)
    if tuple(ids[start : start + len(rendered.token_ids)]) != rendered.token_ids:
        raise ValueError("it writes a video in a different way if there is text")
    return Trial(PromptInputs(token_ids=tuple(ids), media=rendered.placed(start)), inputs)


def trial_text(tokenizer: Tokenizer, kind: Literal["image", "video"], number: int) -> str:
    """Render a conversation with `number` images or videos. Raises one of `TEMPLATE_FAILURES`, or TemplateError."""
    content = number * [{"type": "text", "text": "one"}, {"type": kind}]
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def noise(seed: int) -> DecodedImage:
    return DecodedImage(np.random.default_rng(seed).integers(0, 256, (_HEIGHT, _WIDTH, 3)).astype(np.uint8))


def plain(num_pixels: int) -> DecodedImage:
    side = max(1, int(num_pixels**0.5))
    return DecodedImage(np.zeros((side, side, 3), np.uint8))


class VisionProcessor:
    """Renders media, and remembers the text and token ids of recent ones. Safe to share between threads."""

    def __init__(
        self,
        path: Path,
        processor: ModelProcessor,
        tokenizer: Tokenizer,
        images: ImageRenderer,
        videos: VideoRenderer | str,
        *,
        max_pixels: int,
    ):
        """`videos`: or the end of "This model takes no videos: …"."""
        self._path = path
        self._processor = processor
        self._tokenizer = tokenizer
        self._images = images
        self._videos = videos
        self._max_pixels = max_pixels
        self._lock = threading.Lock()  # processors and their tokenizers are not safe to share between threads
        # By content and `max_side`, without encoder inputs. Nothing is kept before `set_memory`.
        self._known: LRU[Key, RenderedMedia] = LRU(0)
        self._room = ByteRoom()

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
        """Raise ModelLoadError if the checkpoint cannot read images."""
        library = load_library_processor(path, config, trust_remote_code=trust_remote_code)
        settings: dict[str, Any] = {
            "token_id": _image_token_id(path, config),
            "merge_size": int(config["vision_config"].get("spatial_merge_size") or 1),
            "max_pixels": max_pixels,
        }
        markers = [str(getattr(library, name)) for name in _MARKERS if getattr(library, name, None)]
        for marker, options in itertools.product(markers, WAYS):
            processor = ModelProcessor(library, tokenizer, options)
            images = ImageRenderer(processor, tokenizer, marker=marker, **settings)
            if images.works(noise(0)):
                videos = VideoRenderer.find(processor, tokenizer, config, max_pixels=max_pixels)
                return cls(path, processor, tokenizer, images, videos, max_pixels=max_pixels)
        raise unusable(path, "its processor does not write one image at a time")

    def set_memory(self, memory: MemoryBudget) -> None:
        """Set how much may be kept. Nothing is kept before this call."""
        self._room.max_bytes = memory.encoder_inputs_bytes
        self._known.resize(memory.rendered_bytes)

    def scale_down_to(self, max_pixels: int | None) -> None:
        """Lower the limit of images and frames to the size that the encoder reads in time, if that is known."""
        if max_pixels is not None:
            self._max_pixels = self._images.max_pixels = max_pixels
            if isinstance(self._videos, VideoRenderer):
                self._videos.max_pixels = max_pixels

    @property
    def marker(self) -> str:
        """Return the text that a chat template writes for an image."""
        return self._images.marker

    @property
    def video_marker(self) -> str | None:
        """Return the text that a chat template writes for a video; None if the model takes no videos."""
        return None if isinstance(self._videos, str) else self._videos.marker

    @property
    def no_videos(self) -> str | None:
        """Return the end of the sentence "This model takes no videos: …"; None if it takes videos."""
        return self._videos if isinstance(self._videos, str) else None

    @property
    def frame_sampling(self) -> FrameSampling | None:
        return None if isinstance(self._videos, str) else self._videos.sampling

    def recall(self, part: MediaPart, content: bytes, owner: Owner) -> RenderedMedia | None:
        """Return the earlier rendering of the part, if it is known. `content`: the salt and the digest of its file."""
        known = self._known.get((content, _max_side(part)))
        return None if known is None else self._with_inputs(known, (), part, owner)

    def render(self, part: MediaPart, content: bytes, decoded: Decoded, owner: Owner) -> RenderedMedia:
        """Render the part, and remember it without its encoder inputs for later requests with the same file.

        Raises InvalidImage if the processor refuses it.
        """
        if (known := self.recall(part, content, owner)) is not None:
            return known
        rendered = self.render_with_inputs(decoded, _max_side(part))
        known = rendered.with_inputs({} for _ in rendered.items)
        self._known.put((content, _max_side(part)), known, known.text_bytes)
        return self._with_inputs(rendered, rendered.arrays, part, owner)

    def render_again(self, part: MediaPart, decoded: Decoded, digest: bytes) -> RenderedMedia:
        """Render the part with its encoder inputs. Raises InvalidImage, also if the digest is not the same."""
        rendered = self.render_with_inputs(decoded, _max_side(part))
        if rendered.digest != digest:
            raise InvalidImage("it has changed since this request was prepared.")
        return rendered

    def render_with_inputs(self, decoded: Decoded, max_side: int | None = None) -> RenderedMedia:
        """`max_side`: pixels of the longest side that the model sees. Raises InvalidImage if the processor refuses it.

        The result holds its encoder inputs, and nothing is remembered.
        """
        what = f"{decoded.width} x {decoded.height} pixels"
        try:
            with self._lock:
                if isinstance(decoded, DecodedImage):
                    return self._images.render(decoded, max_side)
                what = f"{len(decoded)} frames of {what}"
                assert isinstance(self._videos, VideoRenderer), "videos are refused before they are decoded"
                return self._videos.render(decoded)
        except REFUSALS as error:
            raise InvalidImage(
                f"the model's processor cannot take its {what}: {first_line(error, MAX_REASON)}"
            ) from error

    def _with_inputs(
        self, rendered: RenderedMedia, arrays: Sequence[Arrays], part: MediaPart, owner: Owner
    ) -> RenderedMedia:
        inputs = MediaInputs(lambda: owner.start_again(part, rendered.digest), self._room, arrays)
        return rendered.with_inputs(ItemInputs(inputs, index) for index in range(len(rendered.items)))

    def probe(self) -> VisionProbe:
        """Raise ModelLoadError if the model cannot read images. Videos that it cannot read are refused from now on."""
        text = self._images_text()
        with self._lock:
            images = image_trial(text, self._processor, self._images)
            small, middle = (
                self._images.render(image) for image in (noise(1), plain(min(self._max_pixels, PROBE_PIXELS)))
            )
            largest = self._images.render(plain(self._max_pixels))
            video = self._video_trial()
        return VisionProbe(images, video, (small.alone(), middle.alone()), len(largest.token_ids))

    def refuse_videos(self, reason: str) -> None:
        """`reason`: the end of "This model takes no videos: …"."""
        if isinstance(self._videos, VideoRenderer):
            logger.warning("Videos are refused: %s", reason)
        self._videos = reason

    def _images_text(self) -> str:
        try:
            text = trial_text(self._tokenizer, "image", 2)
        except (*TEMPLATE_FAILURES, TemplateError) as error:
            raise unusable(self._path, f"its chat template fails on one: {first_line(error, MAX_REASON)}") from error
        if text.count(self.marker) != 2:
            raise unusable(self._path, f"its chat template shows no {self.marker} for one")
        return text

    def _video_trial(self) -> Trial | None:
        """Render a video in a text. If that fails, refuse videos from now on, and return None."""
        if isinstance(videos := self._videos, str):
            return None
        fault = "the chat template fails on one"
        failures: tuple[type[Exception], ...] = (*TEMPLATE_FAILURES, TemplateError)
        try:
            text = trial_text(self._tokenizer, "video", 1)
            if text.count(videos.marker) == 1:
                fault, failures = "the checkpoint's processor fails on one", FAULTS
                return _in_pieces(text, videos)
            fault = f"the chat template shows no {videos.marker} for one"
        except failures as error:
            fault = f"{fault}: {first_line(error, MAX_REASON)}"
        self.refuse_videos(fault)
        return None


def _image_token_id(path: Path, config: Mapping[str, Any]) -> int:
    for name in _IMAGE_TOKENS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise unusable(path, f"config.json names no {_IMAGE_TOKENS[0]}")


def _max_side(part: MediaPart) -> int | None:
    return part.max_side if isinstance(part, ImagePart) else None
