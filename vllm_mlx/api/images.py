"""Images as OpenAI's two endpoints name them. Fetches and decodes nothing."""

from typing import Literal

from ..core.messages import ImagePart

Detail = Literal["auto", "low", "high", "original"]
LOW_DETAIL_SIDE = 512  # pixels


def decode_image(url: str, detail: Detail | None, *, param: str) -> ImagePart:
    """`low`: shrunk to fit a square of `LOW_DETAIL_SIDE`. Otherwise the model's own processor sets the size."""
    return ImagePart(url, max_side=LOW_DETAIL_SIDE if detail == "low" else None, param=param)
