"""Renders an image or a clip by the checkpoint's processor; a clip in pieces that are encoded one by one.

The vision encoders served here attend to two frames at a time, so pieces give the same features as the complete clip.

Positions of tokens that form a grid (mRoPE), from Qwen2-VL (arXiv 2409.12191): a grid (t, h, w) spans t, h and w
positions on three axes, counted from its start. Qwen2.5-VL (arXiv 2502.13923) spaces the t axis of a video by time.
"""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from ..core.errors import ModelLoadError, first_line, setting
from ..core.sequence import Layout, MediaItem
from ..formats.remote_code import remote_code
from ..formats.tokenizer import Tokenizer, take_parts_of_file
from .decode import Clip, DecodedImage, fitting, scaled
from .rendered import RenderedMedia, media_item
from .video import FrameSampling

Grid = tuple[int, int, int]  # (t, h, w), in tokens
# Options that give token ids without special tokens. Most processors take the first.
WAYS: tuple[Mapping[str, Any], ...] = (MappingProxyType({"add_special_tokens": False}), MappingProxyType({}))
# Errors of a processor on pixels that it cannot take.
REFUSALS = (ValueError, TypeError, ZeroDivisionError, IndexError, OSError)
# Errors of a processor on kinds of media or texts that it was not written for.
FAULTS = (*REFUSALS, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError, RuntimeError)
MAX_REASON = 200  # characters of a library's message
_NOT_ENCODER_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
# Verified token by token. Videos of other families are refused.
_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
_PIECE_PIXELS = 1 << 20  # encoded together, unless two frames have more


class ModelProcessor:
    """A checkpoint's processor. Not safe to share between threads."""

    def __init__(self, processor: Any, tokenizer: Tokenizer, options: Mapping[str, Any]):
        """`options`: one of `WAYS`."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._options = options
        self.settings = _settings(processor)

    @property
    def video_processor(self) -> Any:
        """Return the part that processes videos; None if the processor takes none."""
        return getattr(self._processor, "video_processor", None)

    def takes(self, name: str) -> bool:
        """Return whether the processor has a parameter of this name."""
        return name in inspect.signature(self._processor.__call__).parameters

    def run(self, text: str, *, keep_all: bool = False, **media: Any) -> tuple[list[int], dict[str, np.ndarray]]:
        """Return token ids of the text, and encoder inputs of its `media`: `images`, or `videos` with their metadata.

        `keep_all`: also return arrays that describe token ids.
        """
        outputs = dict(self._processor(text=[text], **media, **self._options))
        if "images" in outputs:  # the name in some families
            outputs["pixel_values"] = outputs.pop("images")
        ids = [int(token_id) for token_id in np.array(outputs["input_ids"]).reshape(-1)]
        begin = self._tokenizer.encode("", add_special_tokens=True)
        if not self._options and begin and ids[: len(begin)] == begin:
            ids = ids[len(begin) :]  # the chat template writes the first token itself
        left_out = {"input_ids", "attention_mask"} if keep_all else _NOT_ENCODER_INPUTS
        arrays = {name: _array(value) for name, value in outputs.items() if name not in left_out}
        return ids, {name: array for name, array in arrays.items() if array is not None}


def load_library_processor(path: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """Load the processor of a checkpoint. Raises ModelLoadError."""
    from mlx_vlm.utils import get_model_and_args, load_processor

    get_model_and_args(dict(config))  # registers the family's own processor

    def failed(error: Exception) -> ModelLoadError:
        return unusable(path, f"its processor cannot be loaded: {first_line(error, MAX_REASON)}")

    with remote_code(path, "processor", trusted=trust_remote_code, failed=failed):
        processor = load_processor(path, add_detokenizer=False, trust_remote_code=trust_remote_code)
        take_parts_of_file(getattr(processor, "tokenizer", None), path)
        return processor


def unusable(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is a vision checkpoint, but images cannot be served: {reason}. "
        f"Complete the checkpoint, or serve it with {setting('text_only')}."
    )


def _array(value: Any) -> np.ndarray | None:
    """Return a numpy array; None if the value is not an array. A lazy MLX array belongs to the thread that made it."""
    if value is None or isinstance(value, str):
        return None
    array = np.array(value)
    return None if array.dtype == object else array


def _settings(processor: Any) -> bytes:
    parts = [getattr(processor, "image_processor", processor), getattr(processor, "video_processor", None)]
    values = [
        {name: value for name, value in vars(part).items() if not name.startswith("_")}
        for part in parts
        if part is not None
    ]
    return json.dumps(values, sort_keys=True, default=repr).encode()


class ImageRenderer:
    """Not safe to share between threads, like its processor."""

    def __init__(
        self,
        processor: ModelProcessor,
        tokenizer: Tokenizer,
        *,
        token_id: int,
        marker: str,
        merge_size: int = 1,
        max_pixels: int,
    ):
        """`merge_size`: patches along one side of a token, if the processor returns a grid of patches."""
        self.marker = marker  # text that a chat template writes for an image
        self.token_id = token_id
        self._processor = processor
        self._tokenizer = tokenizer
        self._merge_size = merge_size
        self.max_pixels = max_pixels

    def works(self, image: DecodedImage) -> bool:
        """Return whether tokenizing the rendered text of an image gives its placeholders again."""
        try:
            rendered = self.render(image)
        except FAULTS:
            return False
        return rendered.token_ids.count(self.token_id) > 1 and bool(rendered.items[0].inputs)

    def render(self, image: DecodedImage, max_side: int | None = None) -> RenderedMedia:
        """Raise one of `REFUSALS`."""
        ids, inputs = self._processor.run(self.marker, images=[self.fit(image, max_side)])
        grid = self._grid(inputs)
        layout = None if grid is None else image_layout(grid)
        item = media_item(0, tuple(_span(ids, self.token_id)), inputs, layout, self._processor.settings)
        return _rendered(self._tokenizer, ids, self.token_id, (item,), image.num_pixels)

    def fit(self, image: DecodedImage, max_side: int | None = None) -> Image.Image:
        size = fitting(image.width, image.height, self.max_pixels, max_side)
        return Image.fromarray(scaled(image.pixels, size))

    def _grid(self, inputs: Mapping[str, np.ndarray]) -> Grid | None:
        patches = inputs.get("image_grid_thw")
        if patches is None:
            return None
        t, h, w = (int(size) for size in patches.reshape(-1))
        return t, h // self._merge_size, w // self._merge_size


class VideoRenderer:
    """Not safe to share between threads, like its processor."""

    def __init__(
        self,
        processor: ModelProcessor,
        tokenizer: Tokenizer,
        config: Mapping[str, Any],
        *,
        marker: str,
        max_pixels: int,
    ):
        """`config`: the checkpoint's; `max_pixels`: the limit of one frame."""
        self.marker = marker  # text that a chat template writes for a video
        self.sampling = FrameSampling.of(processor.video_processor)
        self._processor = processor
        self._tokenizer = tokenizer
        self.token_id = int(config["video_token_id"])
        self._vision: Mapping[str, Any] = config["vision_config"]
        self.max_pixels = max_pixels

    @classmethod
    def find(
        cls, processor: ModelProcessor, tokenizer: Tokenizer, config: Mapping[str, Any], *, max_pixels: int
    ) -> "VideoRenderer | str":
        """Return the renderer that the checkpoint's files describe, which `probe` tries, or the reason for none."""
        if config.get("model_type") not in _FAMILIES:
            return "videos of its family are not served"
        if processor.video_processor is None:
            return "the checkpoint has no video processor"
        ids = [config.get(f"{name}_token_id") for name in ("vision_start", "video", "vision_end")]
        tokens = [None if token_id is None else tokenizer.added_token(token_id) for token_id in ids]
        if None in tokens:
            return "config.json names no tokens for one"
        marker = "".join(token[0] for token in tokens if token is not None)
        return cls(processor, tokenizer, config, marker=marker, max_pixels=max_pixels)

    @property
    def even_fps(self) -> float:
        """Return the rate at which successive places in time differ by one position."""
        return float(self._vision.get("tokens_per_second", 1)) * self._frames_per_place

    def run(self, text: str, clip: Clip, *, keep_all: bool = False) -> tuple[list[int], dict[str, np.ndarray]]:
        """Run the processor on a text with the clip's marker. Raises one of `REFUSALS`."""
        media: dict[str, Any] = {"videos": [self._fit(clip)]}
        if self._processor.takes("video_metadata"):  # given as one frame per second
            media["video_metadata"] = [{"frames_indices": list(clip.times), "fps": 1.0}]
        return self._processor.run(text, keep_all=keep_all, **media)

    def render(self, clip: Clip, *, piece_pixels: int = _PIECE_PIXELS) -> RenderedMedia:
        """Render a clip; `piece_pixels` are encoded together. Raises one of `REFUSALS`."""
        ids, inputs = self.run(self.marker, clip)
        spots = [index for index, token_id in enumerate(ids) if token_id == self.token_id]
        items = self._items(ids, spots, inputs, clip, piece_pixels)
        return _rendered(self._tokenizer, ids, self.token_id, items, clip.num_pixels)

    def _items(
        self, ids: list[int], spots: list[int], inputs: Mapping[str, np.ndarray], clip: Clip, piece_pixels: int
    ) -> tuple[MediaItem, ...]:
        t, h, w = (int(size) for size in inputs["video_grid_thw"].reshape(-1))
        merge = int(self._vision["spatial_merge_size"])
        grid = (t, h // merge, w // merge)
        patches = inputs["pixel_values_videos"].reshape(t, h * w, -1)
        group = max(1, min(self.max_pixels, piece_pixels) // (h * w * int(self._vision["patch_size"]) ** 2))
        places = np.array(spots).reshape(t, -1)  # positions of the placeholders; a row holds those of two frames
        items = []
        for first, layout in zip(range(0, t, group), self._layouts(grid, places, group, clip), strict=True):
            rows = places[first : first + group]
            start, end = int(rows[0, 0]), int(rows[-1, -1]) + 1
            piece = {
                "pixel_values_videos": patches[first : first + group].reshape(-1, patches.shape[-1]),
                "video_grid_thw": np.array([[len(rows), h, w]]),
            }
            settings = self._processor.settings
            items.append(media_item(start - spots[0], tuple(ids[start:end]), piece, layout, settings))
        return tuple(items)

    def _layouts(self, grid: Grid, places: np.ndarray, group: int, clip: Clip) -> Sequence[Layout]:
        """Return layouts of one grid if the placeholders are contiguous, otherwise of a grid for every two frames."""
        t, h, w = grid
        if places[-1, -1] - places[0, 0] + 1 == places.size:
            return video_layouts(grid, self._step(clip), group)
        layouts = []
        for first in range(0, t, group):
            rows = places[first : first + group]
            gaps = rows[1:, 0] - rows[:-1, -1] - 1
            parts: list[Layout | int] = [image_layout((1, h, w))]
            for gap in gaps:
                parts += [int(gap), image_layout((1, h, w))]
            layouts.append(joined(parts))
        return layouts

    def _step(self, clip: Clip) -> float:
        """Return the positions from one place in time to the next."""
        per_second = self._vision.get("tokens_per_second")
        return 1.0 if per_second is None else per_second * self._frames_per_place / clip.fps

    @property
    def _frames_per_place(self) -> int:
        return int(self._vision["temporal_patch_size"])

    def _fit(self, clip: Clip) -> np.ndarray:
        size = fitting(clip.width, clip.height, self.max_pixels)
        if size == (clip.width, clip.height):
            return clip.pixels
        return np.stack([scaled(frame, size) for frame in clip.pixels])


def _span(ids: list[int], token_id: int) -> list[int]:
    """Return the ids from the first placeholder to the last."""
    return ids[ids.index(token_id) : len(ids) - ids[::-1].index(token_id)]


def _rendered(
    tokenizer: Tokenizer, ids: list[int], token_id: int, items: tuple[MediaItem, ...], num_pixels: int
) -> RenderedMedia:
    """Raise ValueError if tokenizing the text of the ids does not give them again."""
    text = tokenizer.decode(ids)
    if tokenizer.encode(text, add_special_tokens=False) != ids:
        raise ValueError("its placeholders have no text")
    lead = len(tokenizer.decode(ids[: ids.index(token_id)]))
    return RenderedMedia.of(text, lead, tuple(_span(ids, token_id)), items, num_pixels)


def image_layout(grid: Grid) -> Layout:
    return Layout(_axes(grid), max(grid))


def video_layouts(grid: Grid, step: float, group: int) -> list[Layout]:
    """Return layouts of a video that is one grid, in pieces of `group` along t. `step`: positions from t to t + 1."""
    t, h, w = grid
    times = (np.arange(t + 1) * step).astype(np.int32)
    times[t] = max(times[t - 1] + 1, h, w)  # text after the video continues after its longest axis
    layouts = []
    for first in range(0, t, group):
        last = min(t, first + group)
        positions = _axes((last - first, h, w))
        positions[0] = times[first:last][positions[0]]
        layouts.append(Layout(positions - times[first], int(times[last] - times[first])))
    return layouts


def joined(parts: Iterable[Layout | int]) -> Layout:
    """Return the layout of grids and texts in sequence; a text is given by its number of tokens."""
    positions, begin = [], 0
    for part in parts:
        if isinstance(part, int):
            part = Layout(np.tile(np.arange(part, dtype=np.int32), (3, 1)), part)
        positions.append(part.positions + begin)
        begin += part.advance
    return Layout(np.concatenate(positions, axis=1), begin)


def _axes(grid: Grid) -> np.ndarray:
    return np.indices(grid, dtype=np.int32).reshape(3, -1)
