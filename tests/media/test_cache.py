"""What is kept of the last turns, within its bytes, and the bytes counted are those it takes."""

import tracemalloc

import numpy as np

from vllm_mlx.core.sequence import Layout
from vllm_mlx.media.limits import LRU
from vllm_mlx.media.pixels import DecodedImage
from vllm_mlx.media.rendered import RenderedMedia, media_item


def gray(value: int) -> DecodedImage:
    return DecodedImage(np.full((2, 5, 3), value, np.uint8))


def pixels_cache(max_bytes: int) -> LRU[bytes, DecodedImage]:
    return LRU(max_bytes, lambda decoded: decoded.pixels.nbytes)


def test_pictures_stay_within_their_bytes_and_the_longest_unused_go() -> None:
    recent = pixels_cache(60)
    for number in range(2):
        recent.put(bytes([number]), gray(number))
    assert recent.get(b"\0") is not None
    recent.put(b"\2", gray(2))
    assert recent.size == 60
    assert [recent.get(bytes([number])) is not None for number in range(3)] == [True, False, True]
    recent.put(b"\3", DecodedImage(np.zeros((9, 9, 3), np.uint8)))
    assert recent.get(b"\3") is None and recent.get(b"\0") is not None, "what never fits drops nothing"


def test_a_smaller_budget_drops_the_longest_unused() -> None:
    recent = pixels_cache(3 * 30)
    images = [gray(number) for number in range(3)]
    for number, image in enumerate(images):
        recent.put(bytes([number]), image)
    recent.resize(50)
    assert [recent.get(bytes([number])) for number in range(3)] == [None, None, images[2]]
    recent.resize(0)
    assert recent.size == 0
    recent.resize(90)
    recent.put(b"0", images[0])
    assert recent.get(b"0") is images[0]


def test_values_are_many_but_not_endless() -> None:
    known: LRU[str, str] = LRU(1000)
    for name in ("first", "second", *map(str, range(998))):
        known.put(name, name)
    assert known.get("first") == "first"
    known.put("last", "last")
    assert known.get("first") is not None and known.get("second") is None


def rendition(number: int, num_tokens: int = 1000) -> RenderedMedia:
    ids = tuple(1000 + int(token_id) for token_id in np.zeros(num_tokens))  # each an object of its own
    layout = Layout(np.zeros((3, num_tokens), np.int32), num_tokens)
    item = media_item(0, ids, {"pixels": np.full((100, 100), number)}, layout, b"")
    return RenderedMedia.of("".join(["<image>"] * num_tokens), 0, ids, (item,))


def rendered_cache(max_bytes: int) -> LRU[tuple[bytes, int | None], RenderedMedia]:
    return LRU(max_bytes, lambda rendered: rendered.text_bytes)


def without_inputs(rendered: RenderedMedia) -> RenderedMedia:
    return rendered.with_inputs({} for _ in rendered.items)


def test_the_bytes_counted_are_those_it_takes() -> None:
    kept = rendered_cache(1 << 24)
    tracemalloc.start()
    for number in range(50):
        kept.put((bytes([number]), None), without_inputs(rendition(number)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * kept.size < taken < 1.1 * kept.size


def test_the_longest_unused_go_and_what_never_fits_drops_nothing() -> None:
    kept = rendered_cache(3 * rendition(0).text_bytes)
    keys = [(bytes([number]), None) for number in range(4)]
    for number in range(3):
        kept.put(keys[number], rendition(number))
    assert kept.get(keys[0]) is not None
    kept.put(keys[3], rendition(3))
    kept.put((b"huge", None), rendition(9, num_tokens=10_000))
    assert [kept.get(key) is not None for key in keys] == [True, False, True, True]
    assert kept.get((b"huge", None)) is None and kept.size == 3 * rendition(0).text_bytes
