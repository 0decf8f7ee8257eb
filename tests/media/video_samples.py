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
    white_rows: int = 0,  # at the top of every frame
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        for index in range(num_frames):
            frame = np.full((size[1], size[0], 3), (index * STEP) % 256, np.uint8)
            frame[:white_rows] = 255
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def turned(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """An MP4 whose display matrix is this one (ISO 14496-12, 8.3.2)."""
    plain, matrix = (
        b"".join(int(value).to_bytes(4, "big", signed=True) for value in (*(x << 16 for x in row), 0, 0, 0, 1 << 30))
        for row in ((1, 0, 0, 0, 1), (a, b, 0, c, d))
    )
    at = data.index(plain, data.index(b"tkhd"))
    return data[:at] + matrix + data[at + len(plain) :]


def sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()
