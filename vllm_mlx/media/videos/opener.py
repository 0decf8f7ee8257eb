"""How the videos of one checkpoint are read, within the server's limits. Fetches nothing."""

from collections.abc import Sequence

from ...core.config import MediaConfig
from ...core.deadline import Deadline
from ...core.errors import InvalidImage
from ..images.decode import ImageFile
from .file import VideoFile, VideoLimits
from .frames import FrameFiles
from .sampling import FrameSampling


class VideoOpener:
    def __init__(self, config: MediaConfig, sampling: FrameSampling):
        self._sampling = sampling
        self._limits = VideoLimits(
            max_pixels=min(config.max_video_pixels, config.max_request_pixels),
            max_frame_pixels=config.max_image_pixels,
            max_decode_s=config.max_decode_s,
        )

    def open(self, data: bytes, fps: float | None, deadline: Deadline) -> VideoFile:
        """`fps`: frames of a second that are shown; None: the checkpoint's. Raises InvalidImage."""
        return VideoFile(data, self._sampling, self._limits, fps, deadline=deadline)

    @property
    def max_frames(self) -> int:
        return self._sampling.max_frames

    def check_frames(self, num_frames: int) -> None:
        """Raises InvalidImage."""
        if not 0 < num_frames <= self.max_frames:
            raise InvalidImage(f"it has {num_frames} frames; this model takes 1 to {self.max_frames}. Send that many.")

    def frames(self, frames: Sequence[ImageFile], fps: float | None) -> FrameFiles:
        """`fps`: frames that stand for a second; None: as many as the checkpoint would be shown of one.

        Raises InvalidImage.
        """
        return FrameFiles(
            frames,
            fps or self._sampling.fps,
            max_pixels=self._limits.max_pixels,
            max_decode_s=self._limits.max_decode_s,
        )
