"""Which frames of a video a model is shown. Arithmetic; decodes nothing."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

_FRAME_FACTOR = 2  # frames that the towers take together


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """What a checkpoint asks for. Where it does not say, the library's own."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def of(cls, video_processor: Any) -> "FrameSampling":
        said = {field.name: getattr(video_processor, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in said.items() if value})

    def choose(self, num_frames: int, duration_s: float, fps: float | None) -> list[int]:
        """Indices of the frames that are taken of so many, evenly spread from the first to the last. At least one.

        `fps`: None is the checkpoint's.
        """
        wanted = duration_s * (fps or self.fps)
        most = min(self.max_frames, num_frames) // _FRAME_FACTOR * _FRAME_FACTOR
        count = min(max(wanted, self.min_frames), most) // _FRAME_FACTOR * _FRAME_FACTOR
        indices = np.linspace(0, num_frames - 1, max(1, int(count))).round()
        return [int(index) for index in indices]
