"""Positions of a row, cut anywhere, are those that mlx-vlm gives the whole."""

import mlx.core as mx
import numpy as np
import pytest

from vllm_mlx.core.sequence import MediaItem
from vllm_mlx.media.renderers import image_layout, joined, video_layouts
from vllm_mlx.runner.vision_inputs import chunk_positions, text_delta

GRIDS = [(1, 2, 4), (1, 3, 2), (1, 1, 5)]


def image(offset, grid):
    layout = image_layout(grid)
    return MediaItem(b"", offset, layout.positions.shape[1], {}, layout)


IMAGES = [image(offset, grid) for offset, grid in zip((3, 11, 30), GRIDS, strict=True)]
LENGTH = 40


def test_text_advances_all_axes_alike():
    assert (chunk_positions([], 5, 9) == np.array([[5, 6, 7, 8]] * 3)).all()
    assert text_delta([]) == 0


def test_an_image_spans_its_grid_and_text_goes_on_behind_its_longest_side():
    positions = chunk_positions([image(2, (1, 2, 3))], 0, 10)
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert text_delta([image(2, (1, 2, 3))]) == positions[0, 9] - 9


def test_every_cut_gives_the_same_positions():
    whole = chunk_positions(IMAGES, 0, LENGTH)
    for start in range(LENGTH):
        for end in range(start + 1, LENGTH + 1):
            assert (chunk_positions(IMAGES, start, end) == whole[:, start:end]).all()


def pieces(offset, layouts):
    items = []
    for layout in layouts:
        items.append(MediaItem(b"", offset, layout.positions.shape[1], {}, layout))
        offset = items[-1].end
    return items


@pytest.mark.parametrize("group", [1, 2, 5])
def test_a_video_stands_in_time_and_in_whichever_pieces_it_comes(group):
    """Qwen2.5-VL: `floor(t * seconds between grids * tokens a second)`, here 2 frames at 1.5 a second and 2 tokens."""
    step = 2 / 1.5 * 2
    positions = chunk_positions(pieces(3, video_layouts((5, 1, 2), step, group)), 0, 15)
    assert positions[0].tolist() == [0, 1, 2, *(3 + t for t in (0, 0, 2, 2, 5, 5, 8, 8, 10, 10)), 14, 15]
    assert positions[1].tolist() == [0, 1, 2, *[3] * 10, 14, 15]
    assert positions[2].tolist() == [0, 1, 2, *[3, 4] * 5, 14, 15]


def test_text_between_frames_is_text():
    frame = image_layout((1, 2, 2))
    [item] = pieces(1, [joined([frame, 2, frame])])
    assert chunk_positions([item], 0, 12)[2].tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 7]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_they_are_the_librarys(checkpoint, family):
    from mlx_vlm.utils import load_model

    model = load_model(checkpoint(f"vision:{family}"))
    config = model.config
    ids = [5] * LENGTH
    for item in IMAGES:
        ids[item.offset - 1] = config.vision_start_token_id
        ids[item.offset : item.end] = [config.image_token_id] * item.length
    merge = config.vision_config.spatial_merge_size
    grids = mx.array([[t, h * merge, w * merge] for t, h, w in GRIDS])
    theirs, delta = model.language_model.get_rope_index(mx.array([ids]), grids)
    assert (np.array(theirs)[:, 0] == chunk_positions(IMAGES, 0, LENGTH)).all()
    assert int(delta.item()) == text_delta(IMAGES)
