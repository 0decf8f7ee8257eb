"""Bytes of a video file → the frames that a model is shown, by FFmpeg. Sound is left alone, and so are subtitles."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.deadline import Deadline
from ...core.errors import InvalidImage
from ..images.scaling import fitting
from .clip import Clip, FrameStack
from .clock import DecodeClock
from .containers import container
from .sampling import FrameSampling

# Each further decoder is more code that strangers' files reach. By FFmpeg's names of what is encoded.
_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores", "gif"})
_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores,gif"
_THREADS = 2  # of one decoder: the model needs the others
_MAX_FRAMES = 1_000_000  # of a file, counted before any is decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    max_pixels: int  # of all frames that are shown, which are scaled down to that
    max_frame_pixels: int  # of a frame as it is encoded
    max_decode_s: float


class VideoFile:
    """A file whose header has been read, and whose frames have been counted."""

    def __init__(
        self,
        data: bytes,
        sampling: FrameSampling,
        limits: VideoLimits,
        fps: float | None = None,
        *,
        deadline: Deadline,
    ):
        """`fps`: frames of a second that are shown; `deadline`: for reading the header and counting the frames.

        Raises InvalidImage for what is no video, or one beyond a limit, and what the deadline raises.
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
        """File and video stream. What the library finds wrong with them is raised as InvalidImage."""
        import av

        try:
            # Nothing but these bytes is read, whatever they refer to.
            options = {"codec_whitelist": _DECODERS, "protocol_whitelist": "none"}
            with av.open(io.BytesIO(self._data), format=self._format, options=options) as file:
                yield file, self._stream(file)
        except (av.FFmpegError, ValueError, LookupError, MemoryError, ArithmeticError) as error:
            raise InvalidImage("it is broken: its content ends early or contradicts itself.") from error

    def _stream(self, file: Any) -> Any:
        if not file.streams.video:
            raise InvalidImage("there are no pictures in it.")
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
                "(--max-image-pixels). Send smaller ones."
            )
        context.options = {"max_pixels": str(most)}
        context.thread_count = _THREADS
        return stream

    def _stamps(self, file: Any, stream: Any, clock: DecodeClock) -> list[float]:
        """Seconds of each frame, ascending."""
        stamps: list[float] = []
        for packet in file.demux(stream):
            clock.check()
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is None or packet.is_discard:  # the end of the file, or what is cut off
                continue
            stamps.append(float(stamp * packet.time_base))
            if len(stamps) > _MAX_FRAMES:
                raise InvalidImage("it has too many frames.")
        if not stamps:
            raise InvalidImage("there are no pictures in it.")
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
    """Of all frames; the last is shown as long as the others on average."""
    between = stamps[-1] - stamps[0]
    return between * len(stamps) / (len(stamps) - 1) if between > 0 else 1.0


def _upright(frame: Any, size: tuple[int, int]) -> np.ndarray:
    """(height, width, 3), turned as the file says that the camera was held."""
    import av

    width, height = size
    shown = frame.reformat(width, height, format="rgb24", interpolation=av.video.reformatter.Interpolation.BICUBIC)
    turned: np.ndarray = np.rot90(shown.to_ndarray(), round(frame.rotation / 90))
    return turned
