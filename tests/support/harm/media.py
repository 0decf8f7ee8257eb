"""Images and videos that cost more than they weigh: blank ones of many pixels, many frames, broken ones."""

import base64
import functools
import random
import struct
import zlib

SIDES = (64, 1000, 4000, 7000, 20_000)


@functools.cache
def blank_png(side: int, *, is_broken: bool = False, is_colour: bool = False) -> str:
    """A data URL of a square image of one bit a pixel, or of three bytes."""
    row_bytes = 3 * side if is_colour else -(-side // 8)
    packer = zlib.compressobj(9 if side < 5000 else 6)
    packed = b"".join(packer.compress(b"\0" + bytes(row_bytes)) for _ in range(side)) + packer.flush()
    if is_broken:
        packed = packed[: len(packed) // 2]
    header = struct.pack(">IIBBBBB", side, side, 8 if is_colour else 1, 2 if is_colour else 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def odd_image(chance: random.Random, num_bytes: int) -> str:
    """A data URL."""
    side = chance.choice([side for side in SIDES if side**2 // 500 <= max(num_bytes, 1000)])
    kind = chance.randrange(6)
    if kind == 0:
        return "data:image/png;base64," + "A" * num_bytes
    if kind == 1:
        return chance.choice(
            ["data:,", "data:image/png;base64,", "file:///etc/passwd", "http://127.0.0.1:1/", "x" * 99]
        )
    return blank_png(side, is_broken=kind == 2, is_colour=kind == 3 and side <= 4000)


def frames(chance: random.Random, num_bytes: int) -> list[str]:
    """Images that are the frames of one video."""
    image = blank_png(chance.choice([64, 1000, 4000]))
    several = [image] * max(1, min(1000, num_bytes // len(image)))
    return several if chance.random() < 0.7 else [*several, blank_png(100)]


def comma_video(chance: random.Random, num_bytes: int) -> str:
    """A video that is written as frames between commas."""
    unit = chance.choice([",", "A,", blank_png(64).partition(",")[2] + ","])
    return "data:video/jpeg;base64," + unit * max(1, num_bytes // len(unit))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
