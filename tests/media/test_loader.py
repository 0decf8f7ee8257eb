"""A request's images, all together: once each, within bounds, again without asking, and off everybody's loop."""

import asyncio
import base64
import contextlib
import gc
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.running import eventually
from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import InvalidImage, Overloaded, ShuttingDown
from vllm_mlx.core.messages import ImagePart, MediaPart, VideoPart
from vllm_mlx.media import files, loader
from vllm_mlx.media.decode import Decoded, DecodedImage, ImageFile
from vllm_mlx.media.files import MAX_FILES_BYTES
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.sources import MediaRoot
from vllm_mlx.media.video import FrameSampling

from .hosts import HERE, Host, Names, drip, host, image, redirect, web
from .samples import BLUE, RED, AsPixels, Held, as_pixels, corners, encode, turned


class Loading:
    """A loader seen from a request's own event loop."""

    def __init__(self, names: Names | None = None, *, max_files_bytes: int = MAX_FILES_BYTES, **config: object) -> None:
        settings = MediaConfig(**config)
        self.loader = MediaLoader(
            settings,
            MediaRoot(settings.media_root),
            fetcher=web(names or Names({"pictures.test": HERE}), **config),
            max_files_bytes=max_files_bytes,
        )

    def __call__(self, *sources: str | bytes | ImagePart) -> Mapping[str | bytes, DecodedImage]:
        return asyncio.run(self.load([each if isinstance(each, ImagePart) else ImagePart(each) for each in sources]))

    async def load(self, parts: Sequence[ImagePart]) -> Mapping[str | bytes, DecodedImage]:
        loaded = await self.loader.load(parts, as_pixels)
        return {part.source: image for part, image in loaded.items()}

    def refusal(self, *sources: str | bytes | ImagePart) -> str:
        with pytest.raises(InvalidImage) as caught:
            self(*sources)
        return caught.value.message

    def close(self) -> None:
        asyncio.run(self.loader.close())


@pytest.fixture
def loading() -> Iterator[Loading]:
    with_defaults = Loading()
    yield with_defaults
    with_defaults.close()


@pytest.fixture
def pictures() -> Iterator[Host]:
    with host() as running:
        yield running


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


PNG = encode(corners())
RED_PNG, BLUE_PNG = encode(Image.new("RGB", (5, 5), RED)), encode(Image.new("RGB", (5, 5), BLUE))


def test_every_kind_of_source_shows_the_same_picture(pictures: Host, tmp_path: Path) -> None:
    pictures.routes["/a.png"] = image(PNG)
    (tmp_path / "a.png").write_bytes(PNG)
    loading = Loading(media_root=str(tmp_path))
    shown = loading(PNG, data_url(PNG), pictures.url("/a.png"), str(tmp_path / "a.png"), f"file://{tmp_path}/a.png")
    loading.close()
    assert len(shown) == 5 and len({picture.pixels.tobytes() for picture in shown.values()}) == 1


def test_a_source_is_fetched_once_however_often_it_is_shown(pictures: Host, loading: Loading) -> None:
    pictures.routes["/a.png"] = image(PNG, "Cache-Control: no-store")
    assert len(loading(*[pictures.url("/a.png")] * 5)) == 1
    assert pictures.paths() == ["/a.png"]


@pytest.mark.parametrize("headers", [[], ["Cache-Control: no-store"]])
def test_the_next_turn_does_not_fetch_again(pictures: Host, loading: Loading, headers: list[str]) -> None:
    pictures.routes |= {"/a.png": image(RED_PNG, *headers), "/b": redirect("/a.png")}
    for url in (pictures.url("/a.png"), pictures.url("/b")):
        pictures.requests.clear()
        assert loading(url)[url] is loading(url)[url]
        assert pictures.paths().count("/a.png") == 1


def test_an_address_is_fetched_again_after_a_fixed_time(
    pictures: Host, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FRESH_S", 0.0)
    pictures.routes["/a.png"] = [image(data) for data in (RED_PNG, RED_PNG, BLUE_PNG)]
    url = pictures.url("/a.png")
    first, same, changed = (loading(url)[url] for _ in range(3))
    assert first is same and [tuple(shown.pixels[0, 0]) for shown in (first, changed)] == [RED, BLUE]


def test_nothing_is_kept_across_salts(pictures: Host, loading: Loading) -> None:
    pictures.routes["/a"] = image(RED_PNG)
    url, inline = pictures.url("/a"), data_url(BLUE_PNG)

    async def load(salt: str) -> list[DecodedImage]:
        return list((await loading.loader.load([ImagePart(url), ImagePart(inline)], as_pixels, salt=salt)).values())

    mine, yours, mine_again = (asyncio.run(load(salt)) for salt in ("mine", "yours", "mine"))
    assert len(pictures.requests) == 2
    assert all(first is again for first, again in zip(mine, mine_again, strict=True))
    assert not any(first is other for first, other in zip(mine, yours, strict=True))


def test_without_room_for_pictures_everything_is_as_before(pictures: Host) -> None:
    pictures.routes["/a"] = image(RED_PNG)
    loading, url = Loading(media_cache_bytes=0), pictures.url("/a")
    assert [tuple(loading(url)[url].pixels[0, 0]) for _ in range(2)] == [RED, RED]
    loading.close()
    assert len(pictures.requests) == 2


def test_the_longest_unused_pictures_go_first() -> None:
    loading = Loading(media_cache_bytes=2 * 75)
    first, second, third = (data_url(encode(Image.new("RGB", (5, 5), (n, n, n)))) for n in range(3))
    kept = loading(first)[first]
    loading(second)
    assert loading(first)[first] is kept
    loading(third)
    assert loading(first)[first] is kept
    again = loading(second)[second]
    assert loading(second)[second] is again
    loading.close()


@pytest.mark.parametrize(
    ("config", "sources", "words"),
    [
        ({"max_images": 1}, [PNG, PNG], "--limit-mm-per-prompt image=2"),
        ({"max_images": 0}, [PNG], "--limit-mm-per-prompt image=1"),
        ({"max_image_bytes": 10}, [PNG], "--max-image-bytes"),
        ({"max_image_pixels": 40}, [PNG], "--max-image-pixels"),
        ({"max_image_pixels": 48, "max_request_pixels": 90}, [PNG, data_url(PNG)], "--max-request-pixels"),
        ({}, ["/etc/passwd"], "--media-root"),
    ],
)
def test_every_bound_is_named(config: dict[str, int], sources: list[str | bytes], words: str) -> None:
    loading = Loading(**config)
    assert words in loading.refusal(*sources)
    loading.close()


def test_the_bad_one_of_several_is_named(loading: Loading) -> None:
    message = loading.refusal(PNG, data_url(PNG), "data:image/jpeg;base64,AAAA")
    assert message.startswith("Image 3 of this request (`messages`, data:image/jpeg;base64,…): it is not an image")


def test_time_is_for_all_that_a_request_fetches(pictures: Host) -> None:
    slow = drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x")
    pictures.routes |= {f"/{number}": slow for number in range(12)}
    loading = Loading(media_timeout_s=1.5)
    assert "--media-timeout-s" in loading.refusal(*(pictures.url(f"/{number}") for number in range(12)))
    assert len(pictures.requests) <= 4, "a request has four fetches under way"
    assert loading(PNG)[PNG].width == 8
    loading.close()


def test_a_name_server_that_hangs_holds_up_no_other_key_and_ends_with_its_request(pictures: Host) -> None:
    pictures.routes |= {f"/{number}.png": image(PNG) for number in range(2)}
    names, answers = Names({"pictures.test": HERE}), threading.Event()
    names.hang = {f"{number}.silent.test": answers for number in range(80)}
    loading = Loading(names, media_timeout_s=5)

    async def ask(key: str, *urls: str) -> int:
        return len(await loading.loader.load([ImagePart(url) for url in urls], as_pixels, tenant=key))

    async def run() -> None:
        hosts = list(names.hang)
        silent = [asyncio.create_task(ask("ann", *(f"http://{h}/a" for h in hosts[i::20]))) for i in range(20)]
        await asyncio.to_thread(eventually, lambda: len(names.asked) == 12)
        assert await ask("ben", pictures.url("/0.png")) == 1 and not any(task.done() for task in silent)
        errors = await asyncio.gather(*silent, return_exceptions=True)
        assert {type(error) for error in errors} == {InvalidImage}
        assert await ask("ben", pictures.url("/1.png")) == 1
        assert len(names.asked) < 30, "what no request waits for is not looked up"

    asyncio.run(run())
    answers.set()
    assert loading(pictures.url("/0.png"))
    loading.close()


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image counts as large: it is decoded in a process of its own."""
    monkeypatch.setattr(loader, "LARGE_PIXELS", 0)


@pytest.mark.usefixtures("all_large")
def test_a_large_image_is_decoded_in_a_process_to_the_same_pixels(loading: Loading) -> None:
    source = turned(6)
    expected = ImageFile(source, max_pixels=10**6).pixels()
    assert np.array_equal(loading(source)[source].pixels, expected)
    video = VideoPart((data_url(source), data_url(source)))
    with_videos = MediaLoader(MediaConfig(), MediaRoot(None), sampling=FrameSampling())
    clip = asyncio.run(with_videos.load([video], as_pixels))[video]
    asyncio.run(with_videos.close())
    assert np.array_equal(clip.pixels, [expected, expected])


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(
    ("source", "config", "words"),
    [(PNG, {"max_decode_s": 1e-9}, "--max-decode-s"), (PNG[:-30], {}, "Image 1 .* is broken")],
)
def test_a_large_image_that_cannot_be_decoded_is_refused(source: bytes, config: dict[str, float], words: str) -> None:
    loading = Loading(**config)
    assert re.search(words, loading.refusal(source))
    loading.close()


def test_requests_that_are_many_wait_for_room_and_all_are_served() -> None:
    """Forty at once, where the pixels of three fit."""
    sources = [data_url(encode(Image.new("RGB", (10, 10), (number, 0, 0)))) for number in range(40)]
    loading = Loading(max_image_pixels=100, max_request_pixels=300, media_cache_bytes=0)
    num_pixels: list[int] = []

    class Noting(AsPixels):
        def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> int:
            num_pixels.append(loading.loader.num_pixels)
            return int(decoded.pixels[0, 0, 0])

    async def run() -> list[int]:
        loads = await asyncio.gather(*(loading.loader.load([ImagePart(source)], Noting()) for source in sources))
        return [value for loaded in loads for value in loaded.values()]

    assert asyncio.run(run()) == list(range(40))
    assert max(num_pixels) == 300
    loading.close()


def test_files_of_all_requests_have_bounds_and_are_let_go_once_decoded_or_refused() -> None:
    loading = Loading(max_files_bytes=len(PNG), media_cache_bytes=0)
    for _ in range(3):
        assert loading(PNG)[PNG].width == 8
        assert "broken" in loading.refusal(PNG[:-30])
    with pytest.raises(Overloaded, match="again later"):
        loading(PNG, RED_PNG)
    assert loading(PNG)[PNG].width == 8
    loading.close()


def test_whoever_gives_up_gives_back() -> None:
    loading = Loading(max_image_pixels=100, max_request_pixels=100, media_cache_bytes=0)
    source = ImagePart(data_url(encode(Image.new("RGB", (10, 10)))))

    async def run() -> None:
        for pause_s in (0, 0, 0.001, 0.003, 0.01):
            async with Held().load(loading.loader, [source]) as holder:
                waiting = [asyncio.create_task(loading.load([source])) for _ in range(3)]
                await asyncio.sleep(pause_s)
                for task in (*waiting, holder):
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        assert len(await loading.load([source])) == 1

    asyncio.run(run())
    loading.close()


def test_a_refusal_that_nobody_waits_for_is_not_logged(loading: Loading, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        for pause_s in (0, 0.0003, 0.0006, 0.001, 0.002) * 20:
            load = asyncio.create_task(loading.load([ImagePart("no address")]))
            await asyncio.sleep(pause_s)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    asyncio.run(run())
    loading.close()
    gc.collect()
    assert caplog.records == []


def test_closing_fails_what_is_under_way(pictures: Host) -> None:
    pictures.routes["/a"] = drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x")
    loading = Loading()

    async def run() -> None:
        load = asyncio.create_task(loading.load([ImagePart(pictures.url("/a"))]))
        await asyncio.sleep(0.1)
        await loading.loader.close()
        with pytest.raises(Overloaded):
            await load

    asyncio.run(run())
    loading.close()


def test_each_part_that_enters_while_the_loader_closes_has_an_end() -> None:
    """A thread that waits for such a part would never end, and neither would the process."""
    for _ in range(8):
        loading, futures = Loading(), []
        entering = threading.Event()

        def enter() -> None:
            for number in range(300):
                futures.append(loading.loader.start(ImagePart(b"%d" % number), as_pixels, ""))  # noqa: B023
                entering.set()  # noqa: B023

        thread = threading.Thread(target=enter)
        thread.start()
        entering.wait(10)
        loading.close()
        thread.join(10)
        assert len(futures) == 300
        for future in futures:
            with contextlib.suppress(CancelledError):
                assert isinstance(future.exception(10), InvalidImage | ShuttingDown)


def test_the_callers_loop_hardly_waits(loading: Loading) -> None:
    """While pictures of many megapixels are read, the loop that asked for them goes on."""
    noise = Image.effect_noise((2500, 2500), 60).convert("RGB")
    sources = [data_url(encode(noise.rotate(90 * turn), compress_level=0)) for turn in range(2)]
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.001)
            num_ticks += 1

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        await loading.load([ImagePart(source) for source in sources])
        ticking.cancel()

    asyncio.run(run())
    assert num_ticks > 5, "it would be one or two if the loop did the work"


def test_two_shutdowns_may_meet() -> None:
    """A second call, which hurries, comes while the first one ends."""

    async def close_twice() -> None:
        loader = MediaLoader(MediaConfig(), MediaRoot(None))
        await asyncio.gather(*(loader.close() for _ in range(4)))

    for _ in range(20):
        asyncio.run(close_twice())
