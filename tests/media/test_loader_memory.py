"""What the images and videos of a request keep in memory, also where the request is refused."""

import asyncio
import base64
import gc
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from PIL import Image

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import Cancelled, InvalidImage, InvalidVideo, TimeLimit
from vllm_mlx.core.messages import ImagePart, MediaPart, VideoPart
from vllm_mlx.media.decode import Decoded
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.sources import MediaRoot
from vllm_mlx.media.video import FrameSampling
from vllm_mlx.util.tasks import Deadline

from .samples import Held, as_pixels, encode, live_blocks

SIDE = 400
FRAME_BYTES = SIDE * SIDE * 3


@contextmanager
def loading(**config: int) -> Iterator[MediaLoader]:
    loader = MediaLoader(MediaConfig(**config), MediaRoot(None), sampling=FrameSampling())
    try:
        yield loader
    finally:
        asyncio.run(loader.close())


async def load(
    loader: MediaLoader, parts: list[MediaPart], deadline: Deadline | None = None
) -> Mapping[MediaPart, Decoded]:
    return await loader.load(parts, as_pixels, deadline=deadline)


def drain(loader: MediaLoader) -> None:
    """Wait for what threads still decode of requests that are over."""
    for pool in (loader._readers._pool, loader._decoders._pool, loader._frame_workers._pool, loader._renderer._pool):
        met = threading.Barrier(pool._max_workers)
        for waiting in [pool.submit(met.wait) for _ in range(pool._max_workers)]:
            waiting.result()


def url(number: int, size: tuple[int, int] = (SIDE, SIDE), *, cut: int = 0, **options: object) -> str:
    data = encode(Image.new("RGB", size, (number, 0, 0)), **options)
    return "data:image/png;base64," + base64.b64encode(data[: len(data) - cut]).decode()


def sideways(number: int) -> str:
    """A frame that has the others' size but for its orientation, which shows once it is decoded."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return url(number, (SIDE, SIDE // 2), exif=exif)


REFUSED: dict[str, list[MediaPart]] = {
    "the last frame has another size": [VideoPart((*[url(n, (SIDE, SIDE // 2)) for n in range(7)], sideways(7)))],
    "the last frame is broken": [VideoPart((*[url(number) for number in range(7)], url(7, cut=30)))],
    "the last image is broken": [*[ImagePart(url(number)) for number in range(4)], ImagePart(url(4, cut=30))],
}


@pytest.mark.parametrize("parts", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_leaves_no_pixels_whoever_keeps_the_error(parts: list[MediaPart]) -> None:
    """Also before any garbage collection: an error must not hold them in a cycle."""
    kept: list[InvalidImage] = []

    async def refuse() -> None:
        try:
            await load(loader, parts)
        except InvalidImage as error:
            kept.append(error)

    with loading() as loader:
        asyncio.run(refuse())  # what is made once
        drain(loader)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            blocks = live_blocks()
            for _ in range(3):
                asyncio.run(refuse())
            drain(loader)
            assert tracemalloc.get_traced_memory()[0] < FRAME_BYTES
            assert live_blocks() == blocks
        finally:
            tracemalloc.stop()
            gc.enable()
    assert len(kept) == 4


def test_a_video_of_commas_is_refused_before_its_frames_are_made() -> None:
    source = "data:video/jpeg;base64," + "," * 500_000
    with loading() as loader:
        tracemalloc.start()
        try:
            with pytest.raises(InvalidVideo, match="500001 frames; this model takes 1 to 768"):
                asyncio.run(load(loader, [VideoPart(source)]))
            assert tracemalloc.get_traced_memory()[1] < 2 * len(source)
        finally:
            tracemalloc.stop()


def test_the_frames_of_a_video_count_as_pixels_of_their_request() -> None:
    """As many as are in memory at once: all frames as they are shown, and one as it is decoded."""
    parts: list[MediaPart] = [VideoPart((url(0), url(1)))]
    limits = {"max_image_pixels": SIDE * SIDE, "max_video_pixels": 2 * 10_000}
    with loading(**limits, max_request_pixels=SIDE * SIDE + 20_000) as loader:
        assert len(asyncio.run(load(loader, parts))) == 1
    tighter = {**limits, "max_request_pixels": SIDE * SIDE + 10_000}
    with loading(**tighter) as loader, pytest.raises(InvalidImage, match="--max-request-pixels"):
        asyncio.run(load(loader, parts))


def test_nothing_is_begun_once_the_time_of_the_request_is_over_or_its_client_has_left() -> None:
    over, left = Deadline(0, "It took too long (--limit)."), Deadline(60, "")
    left.cancel()
    with loading() as loader:
        for deadline, error in ((over, TimeLimit), (left, Cancelled)):
            with pytest.raises(error):
                asyncio.run(load(loader, [ImagePart(url(0))], deadline))


def test_waiting_for_other_requests_ends_at_the_deadline() -> None:
    async def main() -> None:
        async with Held().load(loader, [ImagePart(url(0))]):
            with pytest.raises(TimeLimit, match="--limit"):
                await load(loader, [ImagePart(url(1))], Deadline(0.05, "It took too long (--limit)."))

    with loading(max_image_pixels=SIDE * SIDE, max_request_pixels=SIDE * SIDE) as loader:
        asyncio.run(main())


def test_who_leaves_before_the_media_are_there_ends_their_preparation() -> None:
    deadline = Deadline(60, "")

    async def main() -> None:
        async with Held().load(loader, [ImagePart(url(0))]):
            waiting = asyncio.create_task(load(loader, [ImagePart(url(1))], deadline))
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.wait([waiting])

    with loading(max_image_pixels=SIDE * SIDE, max_request_pixels=SIDE * SIDE) as loader:
        asyncio.run(main())
    with pytest.raises(Cancelled):
        deadline.check()


def test_a_request_that_got_its_media_goes_on_with_its_deadline() -> None:
    deadline = Deadline(60, "")
    with loading() as loader:
        asyncio.run(load(loader, [ImagePart(url(0))], deadline))
    deadline.check()


def test_pictures_that_are_kept_yield_to_pixels_in_use() -> None:
    """Three images fit, and two beside the pixels of a request."""
    sizes = {"max_image_pixels": SIDE * SIDE, "max_request_pixels": SIDE * SIDE, "media_cache_bytes": 3 * FRAME_BYTES}
    parts = [ImagePart(url(number)) for number in range(4)]

    async def main() -> None:
        first = [await load(loader, [part]) for part in parts[:3]]
        assert loader.decoded.used_bytes == 3 * FRAME_BYTES
        async with Held().load(loader, parts[3:]):
            assert loader.decoded.used_bytes == 2 * FRAME_BYTES
        assert loader.decoded.used_bytes == 3 * FRAME_BYTES
        assert (await load(loader, parts[2:3]))[parts[2]] is first[2][parts[2]], "the first was dropped"

    with loading(**sizes) as loader:
        asyncio.run(main())
