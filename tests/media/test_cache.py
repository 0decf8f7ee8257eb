"""The bytes counted for a rendering are those that it takes."""

import tracemalloc

import numpy as np

from vllm_mlx.core.sequence import Layout
from vllm_mlx.media.rendered import RenderedMedia, media_item
from vllm_mlx.util.lru import LRU


def rendition(number: int, num_tokens: int = 1000) -> RenderedMedia:
    ids = tuple(1000 + int(token_id) for token_id in np.zeros(num_tokens))  # each an object of its own
    layout = Layout(np.zeros((3, num_tokens), np.int32), num_tokens)
    item = media_item(0, ids, {"pixels": np.full((100, 100), number)}, layout, b"")
    rendered = RenderedMedia.of("".join(["<image>"] * num_tokens), 0, ids, (item,))
    return rendered.with_inputs({} for _ in rendered.items)


def test_the_bytes_counted_are_those_it_takes() -> None:
    kept: LRU[tuple[bytes, int | None], RenderedMedia] = LRU(1 << 24)
    tracemalloc.start()
    for number in range(50):
        known = rendition(number)
        kept.put((bytes([number]), None), known, known.text_bytes)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * kept.used_bytes < taken < 1.1 * kept.used_bytes
