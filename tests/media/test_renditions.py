"""What pictures stand for is kept within its bytes, and the bytes counted are those it takes."""

import tracemalloc

import numpy as np

from vllm_mlx.core.sequence import Layout
from vllm_mlx.media.rendition import Rendition, medium
from vllm_mlx.media.renditions import Renditions


def rendition(number: int, num_tokens: int = 1000) -> Rendition:
    ids = tuple(1000 + int(token_id) for token_id in np.zeros(num_tokens))  # each an object of its own
    layout = Layout(np.zeros((3, num_tokens), np.int32), num_tokens)
    item = medium(0, ids, {"pixels": np.full((100, 100), number)}, layout, b"")
    return Rendition.of("".join(["<image>"] * num_tokens), 0, ids, (item,))


def test_the_bytes_counted_are_those_it_takes() -> None:
    kept = Renditions(max_bytes=1 << 24)
    tracemalloc.start()
    for number in range(50):
        kept.put(("", bytes([number]), None), rendition(number))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * kept.num_bytes < taken < 1.1 * kept.num_bytes


def test_the_longest_unused_go_and_what_never_fits_drops_nothing() -> None:
    kept = Renditions(max_bytes=3 * rendition(0).text_bytes)
    keys = [("", bytes([number]), None) for number in range(4)]
    for number in range(3):
        kept.put(keys[number], rendition(number))
    assert kept.get(keys[0]) is not None
    kept.put(keys[3], rendition(3))
    kept.put(("", b"huge", None), rendition(9, num_tokens=10_000))
    assert [kept.get(key) is not None for key in keys] == [True, False, True, True]
    assert kept.get(("", b"huge", None)) is None and kept.num_bytes == kept.max_bytes


def test_tensors_are_not_kept() -> None:
    kept = Renditions(max_bytes=1 << 20)
    kept.put(("", b"", None), rendition(1))
    known = kept.get(("", b"", None))
    assert known is not None and known.digest == rendition(1).digest and known.media[0].inputs == {}
