"""A picture is its pixels."""

import numpy as np
import pytest

from vllm_mlx.media.decode import Clip, DecodedImage


def test_the_size_is_that_of_the_pixels() -> None:
    image = DecodedImage(np.zeros((2, 4, 3), np.uint8))
    clip = Clip(np.zeros((3, 2, 4, 3), np.uint8), (0.0, 0.5, 1.0), 2.0)
    assert (image.width, image.height, image.num_pixels) == (4, 2, 8)
    assert (clip.width, clip.height, clip.num_pixels, len(clip)) == (4, 2, 24, 3)


def test_pixels_are_never_written_to() -> None:
    picture = DecodedImage(np.zeros((1, 1, 3), np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0, 0, 0] = 1
