"""A video that comes as its frames, each an image file of its own."""

from collections.abc import Sequence

from ...core.deadline import Deadline
from ...core.errors import InvalidImage
from ..images.decode import ImageFile
from ..images.scaling import fitting, scaled
from .clip import Clip, FrameStack
from .clock import DecodeClock


class FrameFiles:
    """Image files whose headers have been read. They are decoded one after the other."""

    def __init__(self, frames: Sequence[ImageFile], fps: float, *, max_pixels: int, max_decode_s: float):
        """`fps`: frames that stand for a second; `max_pixels`: of all of them, which are scaled down to that.

        Raises InvalidImage where the headers say that the frames are not of one size.
        """
        self._frames = frames
        self._fps = fps
        self._frame_pixels = max_pixels // len(frames)
        self._max_decode_s = max_decode_s
        sizes = {fitting(frame.width, frame.height, self._frame_pixels) for frame in frames}
        if len({tuple(sorted(size)) for size in sizes}) > 1:  # a frame may yet be turned upright
            raise InvalidImage("its frames are not all of one size.")
        width, height = sizes.pop()
        # In memory at once: the frames as they are shown, and one as it is decoded.
        self.num_pixels = len(frames) * width * height + max(frame.num_pixels for frame in frames)

    def decode(self, deadline: Deadline) -> Clip:
        """Raises InvalidImage, and what the deadline raises."""
        clock, stack = DecodeClock(self._max_decode_s, deadline), FrameStack(len(self._frames))
        for frame in self._frames:
            clock.check()
            pixels = frame.pixels()
            height, width = pixels.shape[:2]
            stack.add(scaled(pixels, fitting(width, height, self._frame_pixels)))
            del pixels  # before the next frame is decoded
        return stack.clip([index / self._fps for index in range(len(stack))], self._fps)
