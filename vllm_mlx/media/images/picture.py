"""One decoded image. Knows neither where it came from nor what a model makes of it."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture or clip that was decoded before, and whose pixels are not at hand."""

    digest: bytes
    num_pixels: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Two pictures with one digest show the same. Safe to share between threads: nobody may write to the pixels."""

    pixels: np.ndarray  # (height, width, 3), uint8, RGB, read-only
    digest: bytes  # of size and pixels

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
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
