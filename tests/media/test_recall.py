"""What was rendered for an earlier request is handed out in place of pixels, which then need not be decoded."""

import asyncio
import base64
from collections.abc import Iterator

import pytest
from PIL import Image

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.messages import ImagePart, MediaPart, VideoPart
from vllm_mlx.media.loader import LoadedMedia, MediaLoader
from vllm_mlx.media.rendered import RenderedMedia
from vllm_mlx.media.sources import MediaRoot
from vllm_mlx.media.video import FrameSampling

from .samples import encode

SIDE = 10
RED, BLUE = (encode(Image.new("RGB", (SIDE, SIDE), color)) for color in ("red", "blue"))
FRAME = "data:image/png;base64," + base64.b64encode(RED).decode()


class Renderings:
    """Keeps an empty rendering of every part that was loaded, and notes the digests that it is asked for."""

    def __init__(self) -> None:
        self.known: dict[tuple[MediaPart, bytes], RenderedMedia] = {}
        self.asked: list[bytes] = []

    def __call__(self, part: MediaPart, digest: bytes) -> RenderedMedia | None:
        self.asked.append(digest)
        return self.known.get((part, digest))

    def load(self, loader: MediaLoader, *parts: MediaPart, salt: str = "") -> LoadedMedia:
        async def run() -> LoadedMedia:
            async with loader.load(parts, salt=salt, recall=self) as loaded:
                return loaded

        loaded = asyncio.run(run())
        for part, media in loaded.items():
            if not isinstance(media, RenderedMedia):
                self.known[part, media.digest] = RenderedMedia.of("", 0, (), ())
        return loaded


@pytest.fixture
def loader() -> Iterator[MediaLoader]:
    """It keeps no pixels, and has room for those of four images at once."""
    config = MediaConfig(max_image_pixels=SIDE * SIDE, max_request_pixels=4 * SIDE * SIDE, media_cache_bytes=0)
    made = MediaLoader(config, MediaRoot(None), sampling=FrameSampling())
    yield made
    asyncio.run(made.close())


def is_known(media: object) -> bool:
    return isinstance(media, RenderedMedia)


@pytest.mark.parametrize("part", [ImagePart(RED), VideoPart((FRAME, FRAME))], ids=["image", "video"])
def test_a_known_part_is_loaded_while_another_request_holds_all_pixels(loader: MediaLoader, part: MediaPart) -> None:
    renderings = Renderings()
    assert not is_known(renderings.load(loader, part)[part])

    async def run() -> None:
        others = [ImagePart(encode(Image.new("RGB", (SIDE, SIDE), (0, 0, number)))) for number in range(4)]
        small = ImagePart(encode(Image.new("RGB", (5, SIDE))))  # small images have a lane of their own
        async with loader.load(others), loader.load([small]), loader.load([part], recall=renderings) as loaded:
            assert is_known(loaded[part])

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_source_is_decoded_if_one_of_its_parts_is_unknown(loader: MediaLoader) -> None:
    renderings, large, small = Renderings(), ImagePart(RED), ImagePart(RED, max_side=5)
    renderings.load(loader, large)
    loaded = renderings.load(loader, small, large)
    assert is_known(loaded[large]) and not is_known(loaded[small])
    loaded = renderings.load(loader, small, large)
    assert is_known(loaded[large]) and is_known(loaded[small])


def test_another_file_with_the_same_pixels_is_known_once_it_is_decoded(loader: MediaLoader) -> None:
    renderings, part = Renderings(), ImagePart(RED)
    other = ImagePart(encode(Image.new("RGB", (SIDE, SIDE), "red"), compress_level=0))
    decoded = renderings.load(loader, part)[part]
    assert not isinstance(decoded, RenderedMedia)
    renderings.known[other, decoded.digest] = RenderedMedia.of("", 0, (), ())
    assert is_known(renderings.load(loader, other)[other])


def test_the_fingerprint_of_a_file_is_not_shared_with_another_salt(loader: MediaLoader) -> None:
    renderings, part = Renderings(), ImagePart(RED)
    renderings.load(loader, part, salt="mine")
    renderings.asked.clear()
    with pytest.raises(Exception, match="max-request-pixels"):  # before anything is decoded
        renderings.load(loader, part, *(ImagePart(BLUE + bytes([n])) for n in range(9)), salt="yours")
    assert not renderings.asked
    with pytest.raises(Exception, match="max-request-pixels"):
        renderings.load(loader, part, *(ImagePart(BLUE + bytes([n])) for n in range(9)), salt="mine")
    assert len(renderings.asked) == 1
