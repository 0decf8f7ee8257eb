"""Decoded images and clips, and the arithmetic of their sizes.

It knows neither their sources nor how a model reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..core.errors import InvalidImage

_MAX_SIDE = 65_535
_MAX_RATIO = 200  # the longer side divided by the shorter one


@dataclass(frozen=True, slots=True, eq=False)
class _Pixels:
    """The pixels of an image or a video. Threads may share them: they become read-only."""

    pixels: np.ndarray  # (…, height, width, 3), uint8, RGB

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.shape[-1] == 3, "RGB bytes"
        self.pixels.flags.writeable = False

    @property
    def num_pixels(self) -> int:
        """The pixels of all frames."""
        return self.pixels.size // 3

    @property
    def height(self) -> int:
        return int(self.pixels.shape[-3])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[-2])


class DecodedImage(_Pixels):
    """One decoded image: its pixels are (height, width, 3)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Clip(_Pixels):
    """The decoded frames of a video: its pixels are (frames, height, width, 3)."""

    times: tuple[float, ...]  # the time of each frame in seconds, ascending
    fps: float  # frames per second of video

    def __len__(self) -> int:
        return len(self.pixels)


Decoded = DecodedImage | Clip


class FrameStack:
    """Collects frames of one size in one array as they are decoded, so that none is in memory twice."""

    def __init__(self, max_frames: int):
        self._max_frames = max_frames
        self._pixels: np.ndarray | None = None
        self._num_frames = 0

    def __len__(self) -> int:
        return self._num_frames

    def add(self, frame: np.ndarray) -> None:
        """`frame`: (height, width, 3), uint8. Raises InvalidImage if its size differs from the frames before."""
        if self._pixels is None:
            self._pixels = np.empty((self._max_frames, *frame.shape), np.uint8)
        if frame.shape != self._pixels.shape[1:]:
            raise InvalidImage("its frames are not all of one size.")
        self._pixels[self._num_frames] = frame
        self._num_frames += 1

    def clip(self, times: Sequence[float], fps: float) -> Clip:
        """`times`: those of the frames; further ones are ignored. Raises InvalidImage if there are no frames."""
        if self._pixels is None:
            raise InvalidImage("none of its frames can be decoded.")
        return Clip(self._pixels[: self._num_frames], tuple(times[: self._num_frames]), fps)


def check_shape(width: int, height: int, what: str = "it has") -> None:
    """Raises InvalidImage for a shape that no model takes, and that takes seconds to scale: a thread or a long side."""
    longer, shorter = max(width, height), max(1, min(width, height))
    if longer > _MAX_SIDE or longer > _MAX_RATIO * shorter:
        raise InvalidImage(
            f"{what} {width} × {height} pixels; a side may have at most {_MAX_SIDE}, and at most {_MAX_RATIO} times as "
            "many as the other. Send a part of it."
        )


def fitting(width: int, height: int, max_pixels: int, max_side: int | None = None) -> tuple[int, int]:
    """The largest (width, height) of the same shape within `max_pixels` and `max_side`. Never larger than given."""
    scale = min(1.0, (max_pixels / (width * height)) ** 0.5)
    if max_side is not None:
        scale = min(scale, max_side / max(width, height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def scaled(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`pixels`: (height, width, 3), uint8; `size`: (width, height). Returns the same array if it has that size."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
