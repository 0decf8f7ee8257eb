"""A video that comes as its frames, each a picture of its own."""

from collections.abc import Sequence

import numpy as np

from ...core.errors import InvalidImage
from ..images.decode import ImageFile
from ..images.picture import Picture
from ..images.scaling import fitting, scaled
from .clip import Clip


class FrameFiles:
    """Pictures whose headers have been read."""

    def __init__(self, frames: Sequence[Picture | ImageFile], fps: float, *, max_pixels: int):
        """`fps`: frames that stand for a second; `max_pixels`: of all of them, which are scaled down to that."""
        self._frames = frames
        self._fps = fps
        self._max_pixels = max_pixels // len(frames)

    @property
    def num_pixels(self) -> int:
        return sum(min(frame.num_pixels, self._max_pixels) for frame in self._frames)

    def decode(self) -> Clip:
        """Raises InvalidImage."""
        pixels = [self._scaled(frame) for frame in self._frames]
        if len({each.shape for each in pixels}) > 1:
            raise InvalidImage("its frames are not all of one size.")
        return Clip.of(np.stack(pixels), [index / self._fps for index in range(len(pixels))], self._fps)

    def _scaled(self, frame: Picture | ImageFile) -> np.ndarray:
        picture = frame if isinstance(frame, Picture) else frame.decode()
        return scaled(picture.pixels, fitting(picture.width, picture.height, self._max_pixels))
