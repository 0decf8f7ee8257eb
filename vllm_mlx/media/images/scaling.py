"""Pixels that are more than a model or the server takes, scaled down. Never up."""

import numpy as np
from PIL import Image


def fitting(width: int, height: int, max_pixels: int, max_side: int | None = None) -> tuple[int, int]:
    """(width, height) in the same shape with at most `max_pixels`, and no side over `max_side`; as it is if it fits."""
    scale = min(1.0, (max_pixels / (width * height)) ** 0.5)
    if max_side is not None:
        scale = min(scale, max_side / max(width, height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def scaled(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`pixels`: (height, width, 3), uint8; `size`: (width, height). The same array if it has that size."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
