"""A video file, or image files that are its frames → the frames that a model sees."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..core.config import MediaConfig
from ..core.errors import InvalidImage
from ..util.tasks import Deadline
from .decode import Clip, FrameStack, ImageFile, fitting, scaled, what_else
from .processes import Frame, Processes, ReadingFailed, sent_pixels, too_slow, undecodable
from .worker import SIZE, THREADS, VideoTask

_FRAME_FACTOR = 2  # frames that vision encoders take together
_READ = "MP4, QuickTime, WebM, Matroska, AVI, GIF"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"RIFF")
_STILL = (b"avif", b"heic", b"heix", b"mif1")
_ADVICE = "Send a shorter one, or a smaller one."
_MAX_FACTS_BYTES = 16 << 20  # the times of all frames


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """Which frames of a video the model sees. The defaults are the library's."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def of(cls, video_processor: Any) -> "FrameSampling":
        given = {field.name: getattr(video_processor, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value})

    def choose(self, num_frames: int, duration_s: float, fps: float | None) -> list[int]:
        """Return indices of the chosen frames, evenly spread from the first to the last; at least one.

        `fps`: frames per second of video; None for the checkpoint's rate.
        """
        wanted = duration_s * (fps or self.fps)
        most = min(self.max_frames, num_frames) // _FRAME_FACTOR * _FRAME_FACTOR
        count = min(max(wanted, self.min_frames), most) // _FRAME_FACTOR * _FRAME_FACTOR
        indices = np.linspace(0, num_frames - 1, max(1, int(count))).round()
        return [int(index) for index in indices]

    def check_frames(self, num_frames: int) -> None:
        """Check the number of frames that a client sent. Raises InvalidImage."""
        if not 0 < num_frames <= self.max_frames:
            raise InvalidImage(f"it has {num_frames} frames; this model takes 1 to {self.max_frames}. Send that many.")


def container(data: bytes) -> str:
    """Return FFmpeg's name of the file format. Raises InvalidImage."""
    start = data[:16]
    if start[4:8] in _BOXES and start[8:12] not in _STILL:
        return "mov"
    if start.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if start.startswith(b"RIFF") and start[8:12] == b"AVI ":
        return "avi"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if start.startswith(_IMAGES):
        raise InvalidImage("it is an image. Send it as one.")
    raise InvalidImage(f"it is {what_else(data, f'not a video that this server reads ({_READ})')}.")


def _frame_pixels(config: MediaConfig, num_frames: int) -> int:
    """Return the limit of each chosen frame, which is scaled down to fit."""
    return min(config.max_video_pixels, config.max_request_pixels) // num_frames


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video file with a valid header and counted frames."""

    data: bytes
    task: VideoTask  # names the frames that the model sees, and their size
    times: Sequence[float]  # when each of these frames is shown, in seconds from the first
    fps: float

    @property
    def num_pixels(self) -> int:
        return self.task.size[0] * self.task.size[1] * len(self.task.wanted)


class VideoReader:
    """Opens and decodes video files, in processes. Used on one event loop."""

    def __init__(self, processes: Processes, sampling: FrameSampling, config: MediaConfig):
        self._processes = processes
        self._sampling = sampling
        self._config = config

    async def open(self, data: bytes, fps: float | None, deadline: Deadline, tenant: str) -> VideoFile:
        """`fps`: frames to choose per second of video.

        Raises InvalidImage if the file is not a video or exceeds a limit, and the deadline's error.
        """
        task = VideoTask(
            max_s=THREADS * self._config.max_decode_s,
            max_memory_bytes=self._processes.max_memory_bytes,
            container=container(data),
            max_frame_pixels=self._config.max_image_pixels,
        )
        [(_, found)] = await self._read(data, task, _MAX_FACTS_BYTES, deadline, tenant)
        (width, height), stamps = SIZE.unpack_from(found), np.frombuffer(found, np.float64, offset=SIZE.size)
        duration_s = _duration_s(stamps)
        wanted = self._sampling.choose(len(stamps), duration_s, fps)
        task = replace(task, wanted=wanted, size=fitting(width, height, _frame_pixels(self._config, len(wanted))))
        return VideoFile(data, task, [float(stamps[at] - stamps[0]) for at in wanted], len(wanted) / duration_s)

    async def decode(self, file: VideoFile, deadline: Deadline, tenant: str) -> Clip:
        """Decode the chosen frames. Raises InvalidImage, and the deadline's error."""
        max_bytes = 3 * file.num_pixels + SIZE.size * len(file.times)
        frames = await self._read(file.data, file.task, max_bytes, deadline, tenant)
        stack = FrameStack(len(file.times))
        for index, (_, found) in enumerate(frames):
            stack.add(sent_pixels(found))
            frames[index] = (b"", b"")  # so that no frame is in memory twice for long
        return stack.clip(file.times, file.fps)

    async def _read(self, data: bytes, task: VideoTask, max_bytes: int, deadline: Deadline, tenant: str) -> list[Frame]:
        try:
            return await self._processes.read(task, data, max_bytes, deadline, tenant)
        except ReadingFailed as error:
            raise undecodable(error, self._config.max_decode_s, _ADVICE) from error


def _duration_s(stamps: np.ndarray) -> float:
    """Return the duration of the video. The last frame is assumed to last as long as the others on average."""
    between = float(stamps[-1] - stamps[0])
    return between * len(stamps) / (len(stamps) - 1) if between > 0 else 1.0


class FrameFiles:
    """A video given as image files with valid headers, which are decoded one after the other."""

    def __init__(self, frames: Sequence[ImageFile], fps: float, config: MediaConfig):
        """`fps`: frames per second of video. Raises InvalidImage if the headers state different sizes."""
        self._frames = frames
        self._fps = fps
        self._frame_pixels = _frame_pixels(config, len(frames))
        self._max_decode_s = config.max_decode_s
        sizes = {fitting(frame.width, frame.height, self._frame_pixels) for frame in frames}
        if len({tuple(sorted(size)) for size in sizes}) > 1:  # orientation may still swap the sides of a frame
            raise InvalidImage("its frames are not all of one size.")
        width, height = sizes.pop()
        # In memory together: all scaled frames, and one frame of full size.
        self.num_pixels = len(frames) * width * height + max(frame.num_pixels for frame in frames)

    def decode(self, deadline: Deadline, pixels: Callable[[ImageFile], np.ndarray] = ImageFile.pixels) -> Clip:
        """`pixels` decodes one frame. Raises InvalidImage, and the deadline's error."""
        end_s, stack = time.monotonic() + self._max_decode_s, FrameStack(len(self._frames))
        for frame in self._frames:
            deadline.check()
            if time.monotonic() > end_s:
                raise too_slow(self._max_decode_s, _ADVICE)
            whole = pixels(frame)
            height, width = whole.shape[:2]
            stack.add(scaled(whole, fitting(width, height, self._frame_pixels)))
            del whole  # before the next frame is decoded
        return stack.clip([index / self._fps for index in range(len(stack))], self._fps)
