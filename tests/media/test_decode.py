"""What files show: every mode and format, upright and opaque; and what is refused."""

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.media.decode import DecodedImage, ImageFile

from .samples import (
    BLUE,
    GREEN,
    RED,
    WHITE,
    animated,
    bomb,
    corners,
    encode,
    live_blocks,
    png,
    png_chunk,
    progressive,
    turned,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")
COLOURS = {"R": RED, "G": GREEN, "B": BLUE, "K": (0, 0, 0)}


def decode(data: bytes, *, max_pixels: int = 10**6) -> DecodedImage:
    return DecodedImage(ImageFile(data, max_pixels=max_pixels).pixels())


def refusal(data: bytes, **options: int) -> str:
    with pytest.raises(InvalidImage) as caught:
        decode(data, **options)
    return caught.value.message


def is_same(picture: DecodedImage, image: Image.Image) -> bool:
    return bool(np.array_equal(picture.pixels, np.array(image.convert("RGB"))))


def quarters(picture: DecodedImage) -> str:
    """The colours of the quarters' middles, row by row."""
    found = ""
    for y in (picture.height // 4, 3 * picture.height // 4):
        for x in (picture.width // 4, 3 * picture.width // 4):
            pixel = picture.pixels[y, x].astype(int)
            [name] = [name for name, colour in COLOURS.items() if np.abs(pixel - colour).max() < 40]
            found += name
    return found


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "AVIF", "JPEG", "GIF"])
def test_formats(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {"quality": 100} if format in ("JPEG", "AVIF") else {}
    assert quarters(decode(encode(corners(64, 48), format, **options))) == "RGBK"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_modes_show_what_pillow_shows(mode: str) -> None:
    gray = corners().convert("L")
    if mode == "I;16":
        image = Image.fromarray(np.array(gray).astype(np.uint16) * 257)
    else:
        image = corners().convert(mode)
    expected = gray if mode == "I;16" else image
    assert is_same(decode(encode(image)), expected)


def test_a_picture_of_16_bits_is_not_clipped() -> None:
    samples = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert decode(encode(Image.fromarray(samples))).pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_cmyk_jpeg_has_its_colours() -> None:
    picture = decode(encode(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG", quality=100))
    assert np.abs(picture.pixels[8, 8].astype(int) - RED).max() < 8


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "L"])
def test_what_is_transparent_is_white(mode: str) -> None:
    if mode in ("RGBA", "LA"):
        data = encode(Image.new(mode, (2, 2), 0))
    else:  # one colour that stands for nothing
        data = encode(Image.new(mode, (2, 2), RED if mode == "RGB" else 7), transparency=RED if mode == "RGB" else 7)
    assert (decode(data).pixels == 255).all()


def test_what_is_half_transparent_is_half_white() -> None:
    assert tuple(decode(encode(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))).pixels[0, 0]) == (255, 127, 127)


def test_a_palette_with_a_transparent_colour() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    for format in ("PNG", "GIF"):
        pixels = decode(encode(image, format, transparency=1)).pixels
        assert [tuple(pixel) for pixel in pixels[0]] == [RED, WHITE]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(format: str) -> None:
    assert tuple(decode(animated(format)).pixels[2, 2]) == RED


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_stands_as_it_was_taken(orientation: int) -> None:
    """The tag says how the stored rows and columns lie: EXIF 2.32, table 4.6.4 A."""
    visual = {1: "RGBK", 2: "GRKB", 3: "KBGR", 4: "BKRG", 5: "RBGK", 6: "BRKG", 7: "KGBR", 8: "GKRB"}
    picture = decode(turned(orientation))
    assert (picture.width, picture.height) == ((64, 48) if orientation < 5 else (48, 64))
    assert quarters(picture) == visual[orientation]


def test_an_orientation_that_cannot_be_read_is_none() -> None:
    data = encode(corners(), exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert is_same(decode(data), corners())
    assert is_same(decode(turned(99, "PNG")), corners(64, 48))


def exif(*entries: bytes, data: bytes = b"") -> bytes:
    """EXIF of one directory, after which `data` follows."""
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4) + data


TAGS: Any = {  # EXIF of 10,000 entries that is hard to read
    "all the same data": exif(*(struct.pack("<HHII", at, 7, 55_000, 8) for at in range(10_000)), data=bytes(55_000)),
    "too many values": exif(*(struct.pack("<HHII", 283, 3, 2, 0) for _ in range(10_000))),
    "data beyond the end": exif(*(struct.pack("<HHII", at, 2, 99, 1 << 24) for at in range(10_000))),
}


def with_tags(kind: str) -> bytes:
    data, chunk = encode(corners()), png_chunk(b"eXIf", TAGS[kind])
    at = data.index(b"IDAT") - 4
    return data[:at] + chunk + data[at:]


@pytest.mark.parametrize("kind", TAGS)
def test_tags_of_a_photograph_cost_little_memory(kind: str) -> None:
    tracemalloc.start()
    assert is_same(decode(with_tags(kind)), corners())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


def test_a_photograph_writes_no_line_of_the_log_and_repeats_no_other_warning(tmp_path: Path) -> None:
    for kind in TAGS:
        (tmp_path / f"{kind}.png").write_bytes(with_tags(kind))
    script = """
import pathlib, sys, warnings
from vllm_mlx.media.decode import ImageFile

for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    warnings.warn("of another library")
    ImageFile(path.read_bytes(), max_pixels=10**6).pixels()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == "<string>:6: UserWarning: of another library\n"


def test_the_content_decides_whatever_it_is_called() -> None:
    assert is_same(decode(encode(corners(), "WEBP", lossless=True)), corners())


def test_a_bomb_is_refused_by_its_header() -> None:
    assert "20000 × 20000" in refusal(bomb(), max_pixels=10**7) or "far too many" in refusal(bomb(), max_pixels=10**7)
    assert "--max-image-pixels" in refusal(encode(Image.new("1", (5000, 5000))), max_pixels=10**7)
    assert "--max-image-pixels" in refusal(png(2**31 - 1, 2**31 - 1))
    assert "scans" in refusal(progressive(200))
    assert decode(progressive(2)).width == 64


def with_sides(data: bytes, at: int, width: int, height: int) -> bytes:
    """The file with other sides where a GIF states them."""
    return data[:at] + width.to_bytes(2, "little") + height.to_bytes(2, "little") + data[at + 4 :]


GIF = encode(corners(64, 48), "GIF")


@pytest.mark.parametrize(
    "data",
    [
        *(
            png(*sides, kind=0)
            for sides in ((49_000_000, 1), (1, 49_000_000), (24_000_000, 2), (65_536, 400), (1001, 5))
        ),
        *(encode(Image.new("L", (201, 1)), format) for format in ("JPEG", "WEBP", "BMP", "AVIF")),
        encode(Image.new("L", (201, 1)), "PNG", save_all=True, append_images=[Image.new("L", (201, 1), 9)]),
        with_sides(GIF, 6, 65_535, 1),  # its canvas
        with_sides(GIF, GIF.index(b",", 13) + 5, 1, 65_535),  # its first frame
    ],
)
def test_an_odd_shape_is_refused_by_the_header(data: bytes) -> None:
    """Pillow's resampling of a thread of pixels takes seconds, in which nothing else runs."""
    blocks = live_blocks()
    with pytest.raises(InvalidImage, match="a side may have at most 65535, and at most 200 times as many as the other"):
        ImageFile(data, max_pixels=50_000_000)
    assert live_blocks() == blocks, "no pixels were made"


def test_what_follows_the_end_of_a_jpeg_is_not_counted() -> None:
    """Phones append a video to a photograph, and its bytes are any bytes."""
    photograph = encode(corners(64, 48), "JPEG", quality=100)
    assert quarters(decode(photograph + b"\xff\xda\0\x02" * 200)) == "RGBK"
    thumbnail = b"\xff\xe1\0\x06\xff\xd9\xff\xd9"  # a segment that holds the end of another image
    assert "scans" in refusal(photograph[:2] + thumbnail + progressive(200)[2:])


def test_a_bmp_that_would_be_decoded_in_python_is_refused() -> None:
    bmp = bytearray(encode(corners().convert("P"), "BMP"))
    bmp[30:34] = (1).to_bytes(4, "little")  # BI_RLE8
    assert "run-length" in refusal(bytes(bmp))


@pytest.mark.parametrize(
    "data",
    [
        b"GIF89a\x01\0\x01\0\0\0\0" + b"\x21\xfe\x01x\0" * 150_000,  # comments, each appended to those before
        b"\xff\xd8" + b"\xff\xfe\0\x02" * 150_000,
        b"\xff\xd8\xff" + b"\0" * 150_000,
        png(4, 4, png_chunk(b"prVt", b"") * 60_000),
    ],
    ids=["GIF", "JPEG", "JPEG of junk", "PNG"],
)
def test_a_file_of_very_many_pieces_is_refused(data: bytes) -> None:
    assert "too many small pieces" in refusal(data)


def test_a_file_whose_header_was_read_holds_no_decoder() -> None:
    """Pillow makes a canvas when it opens some GIFs, and keeps the pixels of what it decoded."""
    before = live_blocks()
    file = ImageFile(encode(corners(), "GIF", transparency=0, disposal=2), max_pixels=10**6)
    assert live_blocks() == before
    picture = DecodedImage(file.pixels())
    assert live_blocks() == before and picture.width == 8


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"\xef\xbb\xbf  <svg/>", "SVG"),
        (b"<!DOCTYPE html><html></html>", "markup"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "HEIC"),
        (b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00", "video"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PK\x03\x04", "ZIP"),
        (b"hello", "not an image that this server reads (PNG, "),
        (encode(Image.new("RGB", (2, 2)), "PPM"), "not an image"),
        (encode(Image.new("RGB", (16, 16)), "ICO"), "ICO"),
        (encode(corners(), "TIFF"), "TIFF"),
        (png(0, 5), "header cannot be read"),
        (encode(corners(), "WEBP")[:20], "header cannot be read"),
        (png(4, 4, png_chunk(b"IDAT", b"not zlib")), "broken"),
        (png(4, 4), "broken"),
    ],
)
def test_what_is_no_image_is_told_what_it_is(data: bytes, words: str) -> None:
    assert words in refusal(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_a_file_cut_anywhere_is_refused_or_whole(format: str) -> None:
    data = encode(corners(32, 32), format)
    for end in range(0, len(data), max(1, len(data) // 60)):
        try:
            picture = decode(data[:end])
        except InvalidImage:
            continue
        assert picture.pixels.shape == (32, 32, 3), "only what ends after its pixels is let pass"
