"""Decoded images and clips, and the arithmetic of their sizes. Knows neither where they came from nor what a model
reads of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from PIL import Image

from ..core.errors import InvalidImage

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The pixels of an image or clip that was decoded before, without holding them."""

    digest: bytes
    num_pixels: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """Two images with the same digest have the same pixels. Safe to share between threads: pixels are read-only."""

    pixels: np.ndarray  # (height, width, 3), uint8, RGB
    digest: bytes  # a digest of size and pixels

    @classmethod
    def of(cls, pixels: np.ndarray) -> "DecodedImage":
        """`pixels`: (height, width, 3), uint8, RGB. They become read-only."""
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3, "RGB bytes"
        pixels = np.ascontiguousarray(pixels)
        pixels.flags.writeable = False
        digest = blake2b(repr(pixels.shape).encode(), digest_size=_DIGEST_BYTES)
        digest.update(pixels.data)
        return cls(pixels, digest.digest())

    @property
    def num_pixels(self) -> int:
        return self.height * self.width

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])


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


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Two clips with the same digest have the same frames. Safe to share between threads: pixels are read-only."""

    pixels: np.ndarray  # (frames, height, width, 3), uint8, RGB
    times: tuple[float, ...]  # the time of each frame in seconds, ascending
    fps: float  # frames per second of video
    digest: bytes  # a digest of pixels and times

    @classmethod
    def of(cls, pixels: np.ndarray, times: Sequence[float], fps: float) -> "Clip":
        """`pixels`: (frames, height, width, 3), uint8, RGB. They become read-only."""
        assert pixels.dtype == np.uint8 and pixels.ndim == 4 and pixels.shape[3] == 3, "RGB bytes"
        assert len(pixels) == len(times) > 0 and fps > 0, "a time for each frame"
        pixels = np.ascontiguousarray(pixels)
        pixels.flags.writeable = False
        digest = blake2b(repr((pixels.shape, tuple(times), fps)).encode(), digest_size=_DIGEST_BYTES)
        digest.update(pixels.data)
        return cls(pixels, tuple(times), fps, digest.digest())

    @property
    def num_pixels(self) -> int:
        """The pixels of all frames."""
        return len(self) * self.height * self.width

    @property
    def height(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[2])

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
        """`times`: of the frames, and perhaps of more that were not added. Raises InvalidImage if there are none."""
        if self._pixels is None:
            raise InvalidImage("none of its frames can be decoded.")
        return Clip.of(self._pixels[: self._num_frames], times[: self._num_frames], fps)
