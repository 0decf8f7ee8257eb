"""Decodes image files with Pillow, and holds the pixels of images and clips. Knows neither sources nor models.

The content decides which format a file has; names and media types are ignored. An animation becomes its first frame.
Colour profiles are not applied.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile as PillowFile

from ..core.errors import InvalidImage, setting

# Pillow may use no other decoders: every further format is more code that clients' files reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_STARTS = (
    (b"%PDF-", "a PDF. Send it as a document, or its pages as images"),
    (b"%!PS", "PostScript"),
    (b"\x1f\x8b", "compressed with gzip. Send the file that is in it"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x00\x00\x01\x00", "an icon (ICO). Send a PNG"),
    (b"II*\0", "a TIFF. Send a PNG"),
    (b"MM\0*", "a TIFF. Send a PNG"),
    (b"8BPS", "a Photoshop document. Send a PNG"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000. Send a PNG or a JPEG"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000. Send a PNG or a JPEG"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL. Send a PNG or a JPEG"),
    (b"\xff\x0a", "a JPEG XL. Send a PNG or a JPEG"),
    (b"\x1a\x45\xdf\xa3", "a video"),
    (b"{", "JSON"),
    (b"data:", "a data URL inside a data URL"),
)
_OWN_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
_MARKUP = re.compile(rb"^(?:\xef\xbb\xbf)?\s*<")
_ORIENTATION = 0x0112
# By EXIF orientation (EXIF 2.32, 4.6.4 A): whether rows become columns, and the steps of rows and columns after that.
_UPRIGHT: Mapping[int, tuple[bool, int, int]] = {
    2: (False, 1, -1),
    3: (False, -1, -1),
    4: (False, -1, 1),
    5: (True, 1, 1),
    6: (True, 1, -1),
    7: (True, -1, -1),
    8: (True, -1, 1),
}
_STRIP_PIXELS = 1 << 20
_MAX_SIDE = 65_535
_MAX_RATIO = 200  # the longer side divided by the shorter one
_MAX_SCANS = 100  # in a progressive JPEG, which has about ten: every scan is a pass over all pixels
_MAX_MARKERS = 10_000  # read from a JPEG; a photograph has less than a hundred
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # neither a restart of a scan nor the byte FF in its data
_IMAGE_START, _IMAGE_END, _SCAN = b"\xd8", b"\xd9", b"\xda"
# Pillow reads every chunk or segment of a file with a few calls, in Python, and keeps many as objects. A large
# photograph takes hundreds of reads, a PNG of 20 MB in chunks of 8 kB ten thousand.
_MAX_READS = 100_000
# Errors of Pillow's decoders on invalid files.
_FAILURES = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
# Pillow warns thousands of times of a small file. Each call of this makes Python repeat all that it has warned of once.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True, slots=True, eq=False)
class _Pixels:
    """The pixels of an image or a video. Threads may share them: they become read-only."""

    pixels: np.ndarray  # (…, height, width, 3), uint8, RGB

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.shape[-1] == 3, "RGB bytes"
        self.pixels.flags.writeable = False

    @property
    def num_pixels(self) -> int:
        """Return the pixels of all frames."""
        return self.pixels.size // 3

    @property
    def height(self) -> int:
        return int(self.pixels.shape[-3])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[-2])


class DecodedImage(_Pixels):
    """One decoded image: its pixels are (height, width, 3)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Clip(_Pixels):
    """The decoded frames of a video: its pixels are (frames, height, width, 3)."""

    times: tuple[float, ...]  # the time of each frame in seconds, ascending
    fps: float  # frames per second of video

    def __len__(self) -> int:
        return len(self.pixels)


Decoded = DecodedImage | Clip


class FrameStack:
    """Collects frames of one size in one array as they are decoded, so that none is in memory twice."""

    def __init__(self, max_frames: int):
        self._max_frames = max_frames
        self._pixels: np.ndarray | None = None
        self._num_frames = 0

    def __len__(self) -> int:
        return self._num_frames

    def add(self, frame: np.ndarray) -> None:
        """Add a frame: (height, width, 3), uint8. Raises InvalidImage if its size differs from the frames before."""
        if self._pixels is None:
            self._pixels = np.empty((self._max_frames, *frame.shape), np.uint8)
        if frame.shape != self._pixels.shape[1:]:
            raise InvalidImage("its frames are not all of one size.")
        self._pixels[self._num_frames] = frame
        self._num_frames += 1

    def clip(self, times: Sequence[float], fps: float) -> Clip:
        """Return the frames as a clip; `times` may have further entries. Raises InvalidImage without frames."""
        if self._pixels is None:
            raise InvalidImage("none of its frames can be decoded.")
        return Clip(self._pixels[: self._num_frames], tuple(times[: self._num_frames]), fps)


def check_shape(width: int, height: int, what: str = "it has") -> None:
    """Raise InvalidImage for a very narrow or very long image: no model takes it, and it takes seconds to scale."""
    longer, shorter = max(width, height), max(1, min(width, height))
    if longer > _MAX_SIDE or longer > _MAX_RATIO * shorter:
        raise InvalidImage(
            f"{what} {width} × {height} pixels; a side may have at most {_MAX_SIDE}, and at most {_MAX_RATIO} times as "
            "many as the other. Send a part of it."
        )


def fitting(width: int, height: int, max_pixels: int, max_side: int | None = None) -> tuple[int, int]:
    """Return the largest (width, height) of the same shape within `max_pixels`, `max_side` and the given size."""
    scale = min(1.0, (max_pixels / (width * height)) ** 0.5)
    if max_side is not None:
        scale = min(scale, max_side / max(width, height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def scaled(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale `pixels`: (height, width, 3), uint8, to `size`: (width, height). May return the same array."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def what_else(data: bytes, unknown: str = f"not an image that this server reads ({', '.join(FORMATS)})") -> str:
    """Return the end of the sentence "it is …": the kind of the file by its first bytes, or `unknown`."""
    start = bytes(data[:2048])
    if not start:
        return "empty"
    if _MARKUP.match(start):
        if b"<svg" in start.lower():
            return "an SVG, which is drawn by a program and not decoded. Send it as a PNG"
        return "a page of markup (HTML or XML)"
    if start.startswith(_OWN_STARTS) or start[4:12] == b"ftypavif":
        return "broken, or of a rare kind: its header cannot be read. Save it again as a PNG"
    if start[4:8] == b"ftyp":
        return "an HEIC. Send it as a JPEG or a PNG" if start[8:12] in _HEIF_BRANDS else "a video"
    for prefix, name in _STARTS:
        if start.startswith(prefix):
            return name
    return unknown


class ImageFile:
    """An image file with a valid header. Holds the file's bytes, but neither a decoder nor pixels."""

    def __init__(self, data: bytes, *, max_pixels: int):
        """Raise InvalidImage if the file is not an image, or would cost too much to decode."""
        self.data = data
        try:
            with _opened(data) as image:
                self.width, self.height = image.size
                is_jpeg = image.format in ("JPEG", "MPO")
                # Pillow decodes a few variants of formats in Python, some hundred times slower than the others.
                is_slow = any(tile[0] in Image.DECODERS for tile in image.tile)
        except Image.DecompressionBombError as error:
            raise InvalidImage(_too_large("far too many", max_pixels)) from error
        except _FAILURES as error:
            raise InvalidImage(f"it is {what_else(data)}.") from error
        if self.num_pixels > max_pixels:
            raise InvalidImage(_too_large(f"{self.width} × {self.height}", max_pixels))
        check_shape(self.width, self.height)
        if is_jpeg and _has_many_scans(data):
            raise InvalidImage(f"it is a JPEG of more than {_MAX_SCANS} scans. Save it again as a baseline JPEG.")
        if is_slow:
            raise InvalidImage(
                "it is a BMP with run-length compression, which this server does not read. Send it as a PNG."
            )

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    def pixels(self) -> np.ndarray:
        """Return (rows, columns, 3), uint8: upright, and on white where it is transparent. Raises InvalidImage."""
        try:
            with _opened(self.data) as image:
                image.load()
                return _upright(_rgb(image), image)
        except _FAILURES as error:
            raise InvalidImage("it is broken: its content ends early or contradicts itself.") from error


class _File(io.BytesIO):
    """The bytes of a file. It refuses more reads than a normal file needs."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > _MAX_READS:
            raise InvalidImage("it consists of too many small pieces. Save it again as a PNG.")
        return super().read(size)


@contextmanager
def _opened(data: bytes) -> Iterator[PillowFile]:
    """Open a file as Pillow's image, which is closed at the end to free the pixels that Pillow itself keeps."""
    image = Image.open(_File(data), formats=FORMATS)
    try:
        yield image
    finally:
        image.close()


def _has_many_scans(data: bytes) -> bool:
    """Count scans up to the end of the image: phones append a second image or a video to a photograph."""
    if data.count(b"\xff" + _SCAN) <= _MAX_SCANS:
        return False
    at = num_scans = 0
    for _ in range(_MAX_MARKERS):
        found = _MARKER.search(data, at)
        if found is None or found[1] == _IMAGE_END:
            return False
        at = found.end()
        if found[1] != _IMAGE_START:
            at += max(2, int.from_bytes(data[at : at + 2]))  # the length of the segment
        num_scans += found[1] == _SCAN
        if num_scans > _MAX_SCANS:
            return True
    return True


def _rgb(image: Image.Image) -> np.ndarray:
    """Return (rows, columns, 3), uint8. Strips save memory, and hold the interpreter lock only briefly."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    step = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, step):
        strip = image.crop((0, top, width, min(height, top + step)))
        pixels[top : top + step] = np.array(_opaque(strip))
    return pixels


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image in RGB, 8 bits a sample."""
    if image.mode.startswith("I;16"):
        samples = np.array(image) >> 8
        return Image.fromarray(samples.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def _upright(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Turn the pixels by the EXIF orientation, if it can be read."""
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except _FAILURES:
        return pixels
    if turn is None:
        return pixels
    swaps, row_step, column_step = turn
    turned = pixels.swapaxes(0, 1) if swaps else pixels
    return np.ascontiguousarray(turned[::row_step, ::column_step])


def _too_large(size: str, max_pixels: int) -> str:
    return (
        f"it has {size} pixels; this server takes images of at most {max_pixels / 1e6:.1f} megapixels "
        f"({setting('max_image_pixels')}). Send a smaller one."
    )
