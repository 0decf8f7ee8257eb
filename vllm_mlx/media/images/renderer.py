"""One picture → what a model is shown of it. Keeps nothing."""

from collections.abc import Mapping

import numpy as np
from PIL import Image

from ...tokens.tokenizer import Tokenizer
from ..layouts import Grid, image_layout
from ..model_processor import FAULTS, ModelProcessor
from ..rendition import Rendition, medium
from .picture import Picture
from .scaling import fitting, scaled


class ImageRenderer:
    """As its processor, not made for several threads."""

    def __init__(
        self,
        processor: ModelProcessor,
        tokenizer: Tokenizer,
        *,
        token_id: int,
        marker: str,
        merge_size: int = 1,
        max_pixels: int,
    ):
        """`merge_size`: patches a side that become one token, where the processor tells of a grid of patches."""
        self.marker = marker  # what a chat template writes for an image
        self.token_id = token_id
        self._processor = processor
        self._tokenizer = tokenizer
        self._merge_size = merge_size
        self._max_pixels = max_pixels

    def works(self, picture: Picture) -> bool:
        """Whether the text of a picture says its very placeholders again."""
        try:
            rendition = self.render(picture)
        except FAULTS:
            return False
        return rendition.token_ids.count(self.token_id) > 1 and bool(rendition.media[0].inputs)

    def render(self, picture: Picture, max_side: int | None = None) -> Rendition:
        """Raises one of `REFUSALS`."""
        ids, inputs = self._processor.run(self.marker, images=[self.fit(picture, max_side)])
        text = self._tokenizer.decode(ids)
        if self._tokenizer.encode(text, add_special_tokens=False) != ids:
            raise ValueError("its placeholders have no text")
        start = ids.index(self.token_id)
        end = len(ids) - ids[::-1].index(self.token_id)
        token_ids = tuple(ids[start:end])
        grid = self._grid(inputs)
        item = medium(0, token_ids, inputs, None if grid is None else image_layout(grid), self._processor.settings)
        return Rendition.of(text, len(self._tokenizer.decode(ids[:start])) if start else 0, token_ids, (item,))

    def fit(self, picture: Picture, max_side: int | None = None) -> Image.Image:
        size = fitting(picture.width, picture.height, self._max_pixels, max_side)
        return Image.fromarray(scaled(picture.pixels, size))

    def _grid(self, inputs: Mapping[str, np.ndarray]) -> Grid | None:
        patches = inputs.get("image_grid_thw")
        if patches is None:
            return None
        t, h, w = (int(size) for size in patches.reshape(-1))
        return t, h // self._merge_size, w // self._merge_size
