"""Opens one video in a process of its own, by FFmpeg. Ignores sound and subtitles. Knows no server.

FFmpeg gets the format to read and never guesses it: some formats that it can guess are lists of other files to open.
"""

import io
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core.errors import InvalidImage, setting
from .own_process import Refused, serve
from .pixels import check_shape

STAMPS, PIXELS = b"s", b"p"  # kinds of frames: the width, height and times of the video; one image of it
SIZE = struct.Struct("=II")  # the beginning of both: width and height
# Every further decoder is more code that strangers' files reach. FFmpeg's names of codecs, then of decoders.
_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores", "gif"})
_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores,gif"
THREADS = 2  # threads of one decoder: the model needs the other cores
_MAX_FRAMES = 1_000_000  # in a file, counted before any is decoded


@dataclass(frozen=True, slots=True)
class VideoTask:
    """What is read of a video: its `wanted` frames, scaled to `size`, or its times if none are wanted."""

    container: str  # FFmpeg's name of the file format
    max_frame_pixels: int
    max_s: float  # computing time
    max_memory_bytes: int
    wanted: Sequence[int] = ()  # indices, ascending
    size: tuple[int, int] = (0, 0)  # width, height


def main() -> None:
    task = VideoTask(**json.loads(sys.argv[1]))
    serve(partial(read_video, task=task), task.max_s, task.max_memory_bytes)


def read_video(data: bytes, task: VideoTask) -> Iterator[tuple[bytes, bytes]]:
    """Yield the times of all frames in seconds, ascending, or each wanted frame. Raises Refused."""
    try:
        with _opened(data, task) as (file, stream):
            if task.wanted:
                for pixels in _frames(file, stream, task):
                    yield PIXELS, SIZE.pack(*pixels.shape[1::-1]) + pixels.tobytes()
            else:
                size = SIZE.pack(stream.codec_context.width, stream.codec_context.height)
                yield STAMPS, size + np.array(_stamps(file, stream)).tobytes()
    except InvalidImage as error:
        raise Refused(error.message) from error


@contextmanager
def _opened(data: bytes, task: VideoTask) -> Iterator[tuple[Any, Any]]:
    """File and video stream. Errors of the library become InvalidImage."""
    import av  # not in the server, which uses the values of this module

    try:
        # Nothing but these bytes is read: files and addresses that they refer to are ignored.
        options = {"codec_whitelist": _DECODERS, "protocol_whitelist": "none"}
        with av.open(io.BytesIO(data), format=task.container, options=options) as file:
            yield file, _stream(file, task.max_frame_pixels)
    except (av.FFmpegError, ValueError, LookupError, MemoryError, ArithmeticError) as error:
        raise InvalidImage("it is broken: its content ends early or contradicts itself.") from error


def _stream(file: Any, most: int) -> Any:
    if not file.streams.video:
        raise InvalidImage("there are no frames in it.")
    stream = file.streams.video[0]
    context = stream.codec_context
    codec = "nothing known" if context is None else context.codec.canonical_name
    if codec not in _CODECS:
        raise InvalidImage(f"it is encoded as {codec[:20]}, which is not read. Send it as H.264.")
    width, height = context.width, context.height
    if width * height <= 0:
        raise InvalidImage("it is broken: it does not say how large its frames are.")
    if width * height > most:
        raise InvalidImage(
            f"its frames have {width} × {height} pixels; this server takes at most {most / 1e6:.1f} megapixels "
            f"({setting('max_image_pixels')}). Send smaller ones."
        )
    check_shape(width, height, "its frames have")
    context.options = {"max_pixels": str(most)}
    context.thread_count = THREADS
    return stream


def _stamps(file: Any, stream: Any) -> list[float]:
    stamps: list[float] = []
    for packet in file.demux(stream):
        stamp = packet.dts if packet.pts is None else packet.pts
        if stamp is None or packet.is_discard:  # the end of the file, or a frame that is cut off
            continue
        stamps.append(float(stamp * packet.time_base))
        if len(stamps) > _MAX_FRAMES:
            raise InvalidImage("it has too many frames.")
    if not stamps:
        raise InvalidImage("there are no frames in it.")
    return sorted(stamps)


def _frames(file: Any, stream: Any, task: VideoTask) -> Iterator[np.ndarray]:
    wanted = set(task.wanted)
    for index, frame in enumerate(file.decode(stream)):
        if index in wanted:
            yield _upright(frame, task.size)
        if index >= task.wanted[-1]:
            break


def _upright(frame: Any, size: tuple[int, int]) -> np.ndarray:
    """(height, width, 3), turned upright as the file says."""
    import av

    width, height = size
    scaled_frame = frame.reformat(
        width, height, format="rgb24", interpolation=av.video.reformatter.Interpolation.BICUBIC
    )
    turned: np.ndarray = np.rot90(scaled_frame.to_ndarray(), round(frame.rotation / 90))
    return turned


if __name__ == "__main__":
    main()
