"""Video files made here: frames that grow brighter, in any container and codec."""

import io

import av
import numpy as np

STEP = 12  # of brightness, from one frame to the next


def encode(
    container: str = "mp4",
    codec: str = "mpeg4",
    *,
    num_frames: int = 20,
    size: tuple[int, int] = (64, 48),
    rate: int = 10,
    pixels: str = "yuv420p",
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        for index in range(num_frames):
            frame = np.full((size[1], size[0], 3), (index * STEP) % 256, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()
