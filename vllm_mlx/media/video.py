"""A video file, or image files that are its frames → the frames that a model sees. Ignores sound and subtitles.

FFmpeg gets the format to read and never guesses it: some formats that it can guess are lists of other files to open.
"""

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..core.config import MediaConfig
from ..core.errors import InvalidImage, setting
from ..core.tasks import Deadline
from .decode import ImageFile, what_else
from .pixels import Clip, FrameStack, fitting, scaled

_FRAME_FACTOR = 2  # frames that vision encoders take together
_READ = "MP4, QuickTime, WebM, Matroska, AVI, GIF"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"RIFF")
_STILL = (b"avif", b"heic", b"heix", b"mif1")
# Every further decoder is more code that strangers' files reach. FFmpeg's names of codecs, then of decoders.
_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores", "gif"})
_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores,gif"
_THREADS = 2  # threads of one decoder: the model needs the other cores
_MAX_FRAMES = 1_000_000  # in a file, counted before any is decoded


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
        """Indices of the chosen frames, evenly spread from the first to the last; at least one.

        `fps`: frames per second of video; None for the checkpoint's.
        """
        wanted = duration_s * (fps or self.fps)
        most = min(self.max_frames, num_frames) // _FRAME_FACTOR * _FRAME_FACTOR
        count = min(max(wanted, self.min_frames), most) // _FRAME_FACTOR * _FRAME_FACTOR
        indices = np.linspace(0, num_frames - 1, max(1, int(count))).round()
        return [int(index) for index in indices]

    def check_frames(self, num_frames: int) -> None:
        """Check how many frames a client sent. Raises InvalidImage."""
        if not 0 < num_frames <= self.max_frames:
            raise InvalidImage(f"it has {num_frames} frames; this model takes 1 to {self.max_frames}. Send that many.")


def container(data: bytes) -> str:
    """FFmpeg's name of the file format. Raises InvalidImage."""
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
    raise InvalidImage(f"it is {what_else(data, f'no video that this server reads ({_READ})')}.")


class DecodeClock:
    """How long decoding one video may take, counted from now. The decoder calls `check` between frames."""

    def __init__(self, limit_s: float, deadline: Deadline):
        """`deadline`: the end of all preparation of the request."""
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s
        self._deadline = deadline

    def check(self) -> None:
        """Raises InvalidImage once the limit has passed, and what the deadline raises."""
        self._deadline.check()
        if time.monotonic() > self._end_s:
            raise InvalidImage(
                f"it takes longer than {self._limit_s:g} seconds to decode ({setting('max_decode_s')}). Send a "
                "shorter one, or a smaller one."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    max_pixels: int  # chosen frames are scaled down to this many together
    max_frame_pixels: int  # in one frame of the file
    max_decode_s: float

    @classmethod
    def of(cls, config: MediaConfig) -> "VideoLimits":
        return cls(
            max_pixels=min(config.max_video_pixels, config.max_request_pixels),
            max_frame_pixels=config.max_image_pixels,
            max_decode_s=config.max_decode_s,
        )


class VideoFile:
    """A video file with a valid header, and counted frames."""

    def __init__(
        self,
        data: bytes,
        sampling: FrameSampling,
        limits: VideoLimits,
        fps: float | None = None,
        *,
        deadline: Deadline,
    ):
        """`fps`: frames to choose per second of video; `deadline`: when the file must have been read.

        Raises InvalidImage if it is no video or exceeds a limit, and what the deadline raises.
        """
        self._data = data
        self._format = container(data)
        self._limits = limits
        clock = DecodeClock(limits.max_decode_s, deadline)
        with self._opened() as (file, stream):
            width, height = stream.codec_context.width, stream.codec_context.height
            stamps = self._stamps(file, stream, clock)
        duration_s = _duration_s(stamps)
        self._wanted = sampling.choose(len(stamps), duration_s, fps)
        self._times = [stamps[index] - stamps[0] for index in self._wanted]
        self._fps = len(self._wanted) / duration_s
        self._size = fitting(width, height, limits.max_pixels // len(self._wanted))
        self.num_pixels = self._size[0] * self._size[1] * len(self._wanted)

    def decode(self, deadline: Deadline) -> Clip:
        """Raises InvalidImage, and what the deadline raises."""
        clock, stack = DecodeClock(self._limits.max_decode_s, deadline), FrameStack(len(self._wanted))
        with self._opened() as (file, stream):
            for frame in self._frames(file, stream, clock):
                stack.add(frame)
        return stack.clip(self._times, self._fps)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """File and video stream. Errors of the library become InvalidImage."""
        import av

        try:
            # Nothing but these bytes is read: files and addresses that they refer to are ignored.
            options = {"codec_whitelist": _DECODERS, "protocol_whitelist": "none"}
            with av.open(io.BytesIO(self._data), format=self._format, options=options) as file:
                yield file, self._stream(file)
        except (av.FFmpegError, ValueError, LookupError, MemoryError, ArithmeticError) as error:
            raise InvalidImage("it is broken: its content ends early or contradicts itself.") from error

    def _stream(self, file: Any) -> Any:
        if not file.streams.video:
            raise InvalidImage("there are no frames in it.")
        stream = file.streams.video[0]
        context = stream.codec_context
        codec = "nothing known" if context is None else context.codec.canonical_name
        if codec not in _CODECS:
            raise InvalidImage(f"it is encoded as {codec[:20]}, which is not read. Send it as H.264.")
        width, height, most = context.width, context.height, self._limits.max_frame_pixels
        if width * height <= 0:
            raise InvalidImage("it is broken: it does not say how large its frames are.")
        if width * height > most:
            raise InvalidImage(
                f"its frames have {width} × {height} pixels; this server takes at most {most / 1e6:.1f} megapixels "
                f"({setting('max_image_pixels')}). Send smaller ones."
            )
        context.options = {"max_pixels": str(most)}
        context.thread_count = _THREADS
        return stream

    def _stamps(self, file: Any, stream: Any, clock: DecodeClock) -> list[float]:
        """The time of every frame in seconds, ascending."""
        stamps: list[float] = []
        for packet in file.demux(stream):
            clock.check()
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is None or packet.is_discard:  # the end of the file, or a frame that is cut off
                continue
            stamps.append(float(stamp * packet.time_base))
            if len(stamps) > _MAX_FRAMES:
                raise InvalidImage("it has too many frames.")
        if not stamps:
            raise InvalidImage("there are no frames in it.")
        return sorted(stamps)

    def _frames(self, file: Any, stream: Any, clock: DecodeClock) -> Iterator[np.ndarray]:
        wanted = set(self._wanted)
        for index, frame in enumerate(file.decode(stream)):
            clock.check()
            if index in wanted:
                yield _upright(frame, self._size)
            if index >= self._wanted[-1]:
                break


def _duration_s(stamps: Sequence[float]) -> float:
    """The duration of the video; the last frame lasts as long as the others on average."""
    between = stamps[-1] - stamps[0]
    return between * len(stamps) / (len(stamps) - 1) if between > 0 else 1.0


def _upright(frame: Any, size: tuple[int, int]) -> np.ndarray:
    """(height, width, 3), turned upright as the file says."""
    import av

    width, height = size
    scaled_frame = frame.reformat(
        width, height, format="rgb24", interpolation=av.video.reformatter.Interpolation.BICUBIC
    )
    turned: np.ndarray = np.rot90(scaled_frame.to_ndarray(), round(frame.rotation / 90))
    return turned


class FrameFiles:
    """A video that is given as image files with valid headers. They are decoded one after the other."""

    def __init__(self, frames: Sequence[ImageFile], fps: float, limits: VideoLimits):
        """`fps`: frames per second of video. Raises InvalidImage if the headers say that the frames differ in size."""
        self._frames = frames
        self._fps = fps
        self._frame_pixels = limits.max_pixels // len(frames)
        self._max_decode_s = limits.max_decode_s
        sizes = {fitting(frame.width, frame.height, self._frame_pixels) for frame in frames}
        if len({tuple(sorted(size)) for size in sizes}) > 1:  # orientation may still swap the sides of a frame
            raise InvalidImage("its frames are not all of one size.")
        width, height = sizes.pop()
        # In memory at once: all scaled frames, and one frame of full size.
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
