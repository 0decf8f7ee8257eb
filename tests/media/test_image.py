"""A picture is its pixels."""

import numpy as np
import pytest

from vllm_mlx.media.pixels import DecodedImage


def test_the_digest_is_of_size_and_pixels() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    picture = DecodedImage.of(pixels)
    assert (picture.width, picture.height) == (4, 2)
    assert DecodedImage.of(pixels.copy()).digest == picture.digest
    assert DecodedImage.of(pixels.reshape(4, 2, 3).copy()).digest != picture.digest
    assert DecodedImage.of(pixels[:, ::-1]).digest != picture.digest


def test_pixels_are_never_written_to() -> None:
    picture = DecodedImage.of(np.zeros((1, 1, 3), np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0, 0, 0] = 1
