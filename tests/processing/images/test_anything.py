"""Whatever stands where an image's source belongs, and whatever a host answers: a picture or a refusal, never more."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.core.messages import ImagePart
from vllm_mlx.processing.images.loader import ImageLoader
from vllm_mlx.processing.images.local import MediaRoot

from .hosts import HERE, Host, Names, drip, host, web
from .samples import corners, encode

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
def loader() -> Iterator[ImageLoader]:
    made = ImageLoader(
        MediaConfig(media_timeout_s=0.5), MediaRoot(None), web=web(Names({"pictures.test": HERE}), media_timeout_s=0.5)
    )
    yield made
    asyncio.run(made.close())


def load(loader: ImageLoader, source: str | bytes) -> None:
    async def run() -> None:
        async with loader.pictures([ImagePart(source)]) as pictures:
            assert pictures[source].num_pixels > 0

    try:
        asyncio.run(run())
    except InvalidImage as error:
        assert len(error.message) < 600


@given(SOURCES | st.binary(max_size=50))
@example("http://pictures.test:/")
@example("http://pictures.test:00/")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_source(loader: ImageLoader, source: str | bytes) -> None:
    load(loader, source)


@given(ANSWERS | REDIRECTS | st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer(loader: ImageLoader, pictures: Host, answer: bytes) -> None:
    pictures.routes["/a"] = drip(answer, b"", pieces=1)
    load(loader, pictures.url("/a"))
