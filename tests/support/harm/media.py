"""Images and videos that cost more than they weigh: blank ones of many pixels, many frames, broken ones."""

import base64
import functools
import random
import struct
import zlib

SIDES = (64, 1000, 4000, 7000, 20_000)


@functools.cache
def blank_png(side: int, *, height: int | None = None, is_broken: bool = False, is_colour: bool = False) -> str:
    """A data URL of an image of one bit a pixel, or of three bytes. It is square unless `height` is given."""
    height = side if height is None else height
    row_bytes = 3 * side if is_colour else -(-side // 8)
    packer = zlib.compressobj(9 if side < 5000 else 6)
    packed = b"".join(packer.compress(b"\0" + bytes(row_bytes)) for _ in range(height)) + packer.flush()
    if is_broken:
        packed = packed[: len(packed) // 2]
    header = struct.pack(">IIBBBBB", side, height, 8 if is_colour else 1, 2 if is_colour else 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def odd_image(chance: random.Random, num_bytes: int) -> str:
    """A data URL."""
    side = chance.choice([side for side in SIDES if side**2 // 500 <= max(num_bytes, 1000)])
    kind = chance.randrange(7)
    if kind == 0:
        return "data:image/png;base64," + "A" * num_bytes
    if kind == 1:
        return chance.choice(
            ["data:,", "data:image/png;base64,", "file:///etc/passwd", "http://127.0.0.1:1/", "x" * 99]
        )
    if kind == 6:
        return strip(chance, num_bytes)
    return blank_png(side, is_broken=kind == 2, is_colour=kind == 3 and side <= 4000)


def strip(chance: random.Random, num_bytes: int) -> str:
    """A data URL of an image that is far wider than high, or far higher than wide."""
    length, thickness = min(49_000_000, 800 * num_bytes), chance.choice([1, 2, 8])
    length //= thickness
    return blank_png(thickness, height=length // 100) if chance.random() < 0.3 else blank_png(length, height=thickness)


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
