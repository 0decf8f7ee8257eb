"""Image files made on the spot, small, in every mode and format."""

import asyncio
import io
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from PIL import Image

from vllm_mlx.core.messages import MediaPart
from vllm_mlx.media.decode import Decoded
from vllm_mlx.media.loader import MediaLoader

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(width: int = 8, height: int = 6) -> Image.Image:
    """Quarters: red and green above, blue and black below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    return Image.fromarray(pixels)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def animated(format: str) -> bytes:
    """Red first, then blue."""
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), BLUE)
    return encode(first, format, save_all=True, append_images=[second], duration=100, loop=0, lossless=True)


def turned(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(
        corners(64, 48), format, exif=exif, **({"quality": 100, "subsampling": 0} if format == "JPEG" else {})
    )


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, kind: int = 2) -> bytes:
    """A PNG whose header says so, whatever its chunks hold."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def bomb(side: int = 20_000) -> bytes:
    """A few hundred kilobytes that are `side`² pixels."""
    rows = zlib.compressobj(9)
    row = bytes(1 + 3 * side)
    data = b"".join(rows.compress(row) for _ in range(64)) + rows.flush()
    return png(side, side, png_chunk(b"IDAT", data))


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan comes again and again."""
    data = encode(corners(64, 64), "JPEG", progressive=True)
    start = data.rfind(b"\xff\xda")
    scan, end = data[start:-2], data[-2:]
    return data[:start] + scan * scans + end


def live_blocks() -> int:
    """Blocks of pixels that Pillow holds."""
    stats = Image.core.get_stats()
    return int(stats["allocated_blocks"] + stats["reused_blocks"] - stats["freed_blocks"])


class AsPixels:
    """Renders a part as its pixels, so that a test sees what was decoded."""

    def recall(self, part: MediaPart, content: bytes) -> None:
        """Recall nothing."""

    def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> Any:
        return decoded


as_pixels = AsPixels()


class Held(AsPixels):
    """A renderer that holds the pixels of requests until `release`."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self.release = threading.Event()

    def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> Any:
        self._entered.set()
        self.release.wait()
        return decoded

    @asynccontextmanager
    async def load(self, loader: MediaLoader, parts: Sequence[MediaPart]) -> AsyncIterator[asyncio.Task[object]]:
        """Hold the pixels of these parts in the block."""
        task = asyncio.create_task(loader.load(parts, self))
        while not self._entered.is_set():
            await asyncio.sleep(0.001)
        try:
            yield task
        finally:
            self.release.set()
            await asyncio.wait([task])
