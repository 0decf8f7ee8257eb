"""What was rendered for an earlier request is handed out in place of pixels, which then need not be decoded."""

import asyncio
import base64
from collections.abc import Iterator

import pytest
from PIL import Image

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.messages import ImagePart, MediaPart, VideoPart
from vllm_mlx.media.decode import Decoded
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.rendered import RenderedMedia
from vllm_mlx.media.sources import MediaRoot
from vllm_mlx.media.video import FrameSampling

from .samples import Held, encode

SIDE = 10
RED, BLUE = (encode(Image.new("RGB", (SIDE, SIDE), color)) for color in ("red", "blue"))
FRAME = "data:image/png;base64," + base64.b64encode(RED).decode()


class Renderings:
    """Keeps an empty rendering of every part that was loaded, and notes the files that it is asked for."""

    def __init__(self) -> None:
        self.known: dict[tuple[MediaPart, bytes], RenderedMedia] = {}
        self.asked: list[bytes] = []
        self.decoded: list[MediaPart] = []

    def recall(self, part: MediaPart, content: bytes) -> RenderedMedia | None:
        self.asked.append(content)
        return self.known.get((part, content))

    def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> RenderedMedia:
        self.decoded.append(part)
        return self.known.setdefault((part, content), RenderedMedia.of("", 0, (), (), decoded.num_pixels))

    def load(self, loader: MediaLoader, *parts: MediaPart, salt: str = "") -> list[MediaPart]:
        """The parts that had to be decoded."""
        self.decoded.clear()
        loaded = asyncio.run(loader.load(parts, self, salt=salt))
        assert list(loaded) == list(parts)
        return list(self.decoded)


@pytest.fixture
def loader() -> Iterator[MediaLoader]:
    """It keeps no pixels, and has room for those of four images at once."""
    config = MediaConfig(max_image_pixels=SIDE * SIDE, max_request_pixels=4 * SIDE * SIDE, media_cache_bytes=0)
    made = MediaLoader(config, MediaRoot(None), sampling=FrameSampling())
    yield made
    asyncio.run(made.close())


@pytest.mark.parametrize("part", [ImagePart(RED), VideoPart((FRAME, FRAME))], ids=["image", "video"])
def test_a_known_part_is_loaded_while_another_request_holds_all_pixels(loader: MediaLoader, part: MediaPart) -> None:
    renderings = Renderings()
    assert renderings.load(loader, part) == [part]

    async def run() -> None:
        others = [ImagePart(encode(Image.new("RGB", (SIDE, SIDE), (0, 0, number)))) for number in range(4)]
        small = ImagePart(encode(Image.new("RGB", (5, SIDE))))  # small images have a lane of their own
        held = Held()
        async with held.load(loader, others) as one, held.load(loader, [small]) as other:
            while loader.num_pixels < 4 * SIDE * SIDE + 5 * SIDE:
                await asyncio.sleep(0.001)
            await loader.load([part], renderings)
            assert renderings.decoded == [part] and not one.done() and not other.done()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_source_is_decoded_if_one_of_its_parts_is_unknown(loader: MediaLoader) -> None:
    renderings, large, small = Renderings(), ImagePart(RED), ImagePart(RED, max_side=5)
    renderings.load(loader, large)
    assert small in renderings.load(loader, small, large)
    assert renderings.load(loader, small, large) == []


def test_what_was_rendered_of_a_file_is_not_shared_with_another_salt(loader: MediaLoader) -> None:
    renderings, part = Renderings(), ImagePart(RED)
    assert renderings.load(loader, part, salt="mine") == [part]
    mine = set(renderings.asked)
    renderings.asked.clear()
    assert renderings.load(loader, part, salt="yours") == [part]
    assert not mine & set(renderings.asked)
    assert renderings.load(loader, part, salt="mine") == []
