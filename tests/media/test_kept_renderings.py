"""Rendered images and videos are what they were after they were written as JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.core.sequence import Layout, MediaItem
from vllm_mlx.media.kept_renderings import MALFORMED, name_of, rendering_of, rendering_value
from vllm_mlx.media.rendered import RenderedMedia
from vllm_mlx.media.renderers import image_layout

DIGESTS = st.binary(min_size=16, max_size=16)
LAYOUTS = st.none() | st.builds(image_layout, st.tuples(st.just(1), st.integers(1, 5), st.integers(1, 5)))
ITEMS = st.builds(MediaItem, DIGESTS, st.integers(0, 99), st.integers(1, 99), st.just({}), LAYOUTS)
KEYS = st.tuples(st.binary(min_size=16, max_size=24), st.none() | st.integers(1, 99))
RENDERED = st.builds(
    RenderedMedia.of,
    st.text(),
    st.integers(0, 9),
    st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    st.lists(ITEMS, max_size=3).map(tuple),
    st.integers(0, 10**9),
)


@given(KEYS, RENDERED)
def test_all_but_the_encoder_inputs_is_the_same(key: tuple[bytes, int | None], rendered: RenderedMedia) -> None:
    found, again = rendering_of(json.loads(json.dumps(rendering_value(key, rendered))))
    assert found == key
    for name in ("text", "num_lead_chars", "token_ids", "digest", "num_pixels"):
        assert getattr(again, name) == getattr(rendered, name)
    for was, item in zip(rendered.items, again.items, strict=True):
        assert (item.digest, item.offset, item.length, item.inputs) == (was.digest, was.offset, was.length, {})
        assert (item.layout is None) == (was.layout is None)
        if isinstance(item.layout, Layout) and was.layout is not None:
            assert item.layout.advance == was.layout.advance
            assert item.layout.positions.dtype == was.layout.positions.dtype
            assert np.array_equal(item.layout.positions, was.layout.positions)


def test_images_of_other_sizes_or_salts_have_other_names() -> None:
    keys = [(b"salt" + b"d" * 16, None), (b"d" * 16, None), (b"d" * 16, 5), (b"e" * 16, 5)]
    assert len(set(map(name_of, keys))) == len(keys)


@pytest.mark.parametrize("value", [{}, [], {"content": "zz"}, 5])
def test_anything_else_is_malformed(value: object) -> None:
    with pytest.raises(MALFORMED):
        rendering_of(value)  # type: ignore[arg-type]
