"""Whatever file comes, stands where a source belongs, or is answered by a host: a picture or a refusal, never more."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.core.messages import ImagePart
from vllm_mlx.media.decode import DecodedImage, ImageFile
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.sources import MediaRoot

from .hosts import HERE, Host, Names, drip, host, web
from .samples import animated, as_pixels, corners, encode, progressive, turned

PNG = encode(corners())
STARTS = [
    "",
    "data:",
    "data:image/png;base64,",
    "http://",
    "https://",
    "http://[",
    "file:",
    "file://",
    "/",
    "//",
    "http:",
]
HOSTS = [
    "pictures.test",
    "[::1]",
    "127.0.0.1",
    "a..b",
    "xn--",
    "xn--a-ä",
    "%00",
    "user@x",
    "x:99999",
    "x:-1",
    "x:a",
    ".",
    "-",
]
TEXTS = st.text(st.characters(codec=None), max_size=40)
SOURCES = st.builds(
    lambda start, host, rest: start + host + rest, st.sampled_from(STARTS), st.sampled_from(HOSTS), TEXTS
)
LINES = [
    "HTTP/1.1 200 OK", "HTTP/1.1 302 Found", "HTTP/1.0 200", "HTTP/9.9 999 ?", "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 5, 5", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip",
    "Location: /", "Location: http://[", "Location: é\x00", "Content-Type: image/png", "Content-Type: ;;;", "Age: x",
    "Cache-Control: max-age=", "Cache-Control: max-age=99999999999999999999", "ETag: \xff", "Vary: *",
    "Connection: close", "", "5\r\nhello\r\n0\r\n",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(LINES) | st.text(max_size=20), max_size=8).map(
    lambda lines: "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + PNG
)
REDIRECTS = (SOURCES | TEXTS).map(
    lambda source: b"HTTP/1.1 302 Found\r\nLocation: " + source.encode("utf-8", "surrogatepass") + b"\r\n\r\n"
)


@pytest.fixture(scope="module")
def pictures() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture(scope="module")
def loader() -> Iterator[MediaLoader]:
    fetcher = web(Names({"pictures.test": HERE}), media_timeout_s=0.5)
    made = MediaLoader(MediaConfig(media_timeout_s=0.5), MediaRoot(None), fetcher=fetcher)
    yield made
    asyncio.run(made.close())


def load(loader: MediaLoader, source: str | bytes) -> None:
    async def run() -> None:
        pictures = await loader.load([ImagePart(source)], as_pixels)
        assert pictures[ImagePart(source)].num_pixels > 0

    try:
        asyncio.run(run())
    except InvalidImage as error:
        assert len(error.message) < 600


@given(SOURCES | st.binary(max_size=50))
@example("http://pictures.test:/")
@example("http://pictures.test:00/")
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_source(loader: MediaLoader, source: str | bytes) -> None:
    load(loader, source)


@given(ANSWERS | REDIRECTS | st.binary(max_size=200))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer(loader: MediaLoader, pictures: Host, answer: bytes) -> None:
    pictures.routes["/a"] = drip(answer, b"", pieces=1)
    load(loader, pictures.url("/a"))


FILES = [
    *(encode(corners(24, 24), format) for format in ("PNG", "JPEG", "WEBP", "BMP", "AVIF")),
    *(animated(format) for format in ("GIF", "PNG", "WEBP")),
    encode(corners().convert("P"), transparency=0),
    progressive(3),
    turned(6),
]
PLACES = st.one_of(st.integers(0, 40), st.integers(0, 4000))  # headers first
LENGTHS = st.sampled_from([0, 1, 2, 4, 8, 64])
PIECES = st.binary(max_size=8) | st.sampled_from([b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80", b"\xff\xda"])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file of which runs of bytes are replaced by others, shorter and longer ones, or by a part of another file."""
    data = draw(st.sampled_from(FILES))
    for _ in range(draw(st.integers(1, 6))):
        start, length = draw(PLACES) % (len(data) + 1), draw(LENGTHS)
        other = draw(st.sampled_from(FILES))
        piece = draw(PIECES | st.integers(0, len(other)).map(lambda at, other=other: other[at : at + 64]))
        data = data[:start] + piece + data[start + length :]
    return data


@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")
@given(damaged())
@settings(max_examples=examples(150))
def test_any_damaged_file(data: bytes) -> None:
    try:
        picture = DecodedImage(ImageFile(data, max_pixels=10**6).pixels())
    except InvalidImage as error:
        assert error.message
    else:
        assert picture.pixels.dtype == np.uint8 and picture.num_pixels <= 10**6
