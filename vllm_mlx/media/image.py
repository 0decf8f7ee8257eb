"""One decoded image, and the arithmetic of its size. Knows neither where it came from nor what a model reads of it."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from PIL import Image

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
