"""What is kept of the last turns, within its bytes, and the bytes counted are those it takes."""

import tracemalloc

import numpy as np
import pytest

from vllm_mlx.core.sequence import Layout
from vllm_mlx.media.cache import DecodedCache, KnownAddresses, RenderedCache
from vllm_mlx.media.fetch import Fetched
from vllm_mlx.media.pixels import DecodedImage, Fingerprint
from vllm_mlx.media.rendered import RenderedMedia, media_item


def gray(value: int) -> DecodedImage:
    return DecodedImage.of(np.full((2, 5, 3), value, np.uint8))


def test_pictures_stay_within_their_bytes_and_the_longest_unused_go() -> None:
    recent = DecodedCache(max_bytes=60)
    for number in range(2):
        recent.put(bytes([number]), gray(number))
    assert recent.get(b"\0") is not None
    recent.put(b"\2", gray(2))
    assert recent.num_bytes == 60
    assert [recent.get(bytes([number])) is not None for number in range(3)] == [True, False, True]
    recent.put(b"\3", DecodedImage.of(np.zeros((9, 9, 3), np.uint8)))
    assert recent.get(b"\3") is None and recent.get(b"\0") is not None, "what never fits drops nothing"


def test_the_fingerprint_of_an_image_stays_when_its_pixels_go() -> None:
    cache = DecodedCache(max_bytes=30)
    for number in range(2):
        cache.put(bytes([number]), gray(number))
    assert cache.get(b"\0") is None
    assert cache.fingerprint(b"\0") == Fingerprint(gray(0).digest, 10)
    assert cache.get(b"\1") is not None and cache.fingerprint(b"\1") == Fingerprint(gray(1).digest, 10)
    assert cache.fingerprint(b"\2") is None


def test_addresses_are_many_but_not_endless() -> None:
    known = KnownAddresses()
    answer = Fetched(data=b"data", url="u", fresh_s=5)
    known.put((b"", "first"), answer, b"", 10)
    known.put((b"", "second"), answer, b"", 10)
    for number in range(998):
        known.put((b"", f"http://{number}"), answer, b"", 10)
    first = known.get((b"", "first"))
    assert first is not None and first.fresh_until_s == 15 and first.answer.data is None
    known.put((b"", "last"), answer, b"", 10)
    assert known.get((b"", "first")) is not None and known.get((b"", "second")) is None


@pytest.mark.parametrize(("asked", "led_to"), [("u" * 9000, "u"), ("u", "u" * 9000)])
def test_an_address_that_is_far_too_long_is_not_kept(asked: str, led_to: str) -> None:
    known = KnownAddresses()
    known.put((b"", asked, ""), Fetched(data=b"data", url="u", fresh_s=5), b"", 10)
    known.put((b"", asked, ""), Fetched(data=b"data", url=led_to, fresh_s=5), b"", 10)
    assert known.get((b"", asked, "")) is None


def rendition(number: int, num_tokens: int = 1000) -> RenderedMedia:
    ids = tuple(1000 + int(token_id) for token_id in np.zeros(num_tokens))  # each an object of its own
    layout = Layout(np.zeros((3, num_tokens), np.int32), num_tokens)
    item = media_item(0, ids, {"pixels": np.full((100, 100), number)}, layout, b"")
    return RenderedMedia.of("".join(["<image>"] * num_tokens), 0, ids, (item,))


def test_the_bytes_counted_are_those_it_takes() -> None:
    kept = RenderedCache(max_bytes=1 << 24)
    tracemalloc.start()
    for number in range(50):
        kept.put(("", bytes([number]), None), rendition(number))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * kept.num_bytes < taken < 1.1 * kept.num_bytes


def test_the_longest_unused_go_and_what_never_fits_drops_nothing() -> None:
    kept = RenderedCache(max_bytes=3 * rendition(0).text_bytes)
    keys = [("", bytes([number]), None) for number in range(4)]
    for number in range(3):
        kept.put(keys[number], rendition(number))
    assert kept.get(keys[0]) is not None
    kept.put(keys[3], rendition(3))
    kept.put(("", b"huge", None), rendition(9, num_tokens=10_000))
    assert [kept.get(key) is not None for key in keys] == [True, False, True, True]
    assert kept.get(("", b"huge", None)) is None and kept.num_bytes == 3 * rendition(0).text_bytes


def test_tensors_are_not_kept() -> None:
    kept = RenderedCache(max_bytes=1 << 20)
    kept.put(("", b"", None), rendition(1))
    known = kept.get(("", b"", None))
    assert known is not None and known.digest == rendition(1).digest and known.items[0].inputs == {}
