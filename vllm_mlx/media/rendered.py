"""A picture as a model is shown it: text, ids and tensors. Knows neither its processor nor a conversation."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ..core.sequence import EncoderInputs, Layout, MediaItem, PromptInputs

_DIGEST_BYTES = 16
_OBJECT_BYTES = 1000  # of a rendition and of each of its media, beside texts and arrays


@dataclass(frozen=True, slots=True, eq=False)
class RenderedMedia:
    text: str  # stands for it in a rendered conversation
    num_lead_chars: int  # of the text, before the placeholders
    token_ids: tuple[int, ...]  # from the first placeholder to the last
    media: tuple[MediaItem, ...]  # offsets are from the first placeholder
    digest: bytes  # of all that the model is shown

    @classmethod
    def of(
        cls, text: str, num_lead_chars: int, token_ids: tuple[int, ...], media: tuple[MediaItem, ...]
    ) -> "RenderedMedia":
        digest = blake2b(repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
        for item in media:
            digest.update(item.digest)
        numbers: dict[int, int] = {}  # so that the id of a thousand placeholders is one object
        token_ids = tuple(numbers.setdefault(token_id, token_id) for token_id in token_ids)
        return cls(text, num_lead_chars, token_ids, media, digest.digest())

    def placed(self, offset: int) -> tuple[MediaItem, ...]:
        return tuple(replace(item, offset=item.offset + offset) for item in self.media)

    def alone(self) -> PromptInputs:
        return PromptInputs(token_ids=self.token_ids, media=self.media)

    def with_inputs(self, inputs: Iterable[EncoderInputs]) -> "RenderedMedia":
        """`inputs`: of each of the media."""
        media = (replace(item, inputs=each) for item, each in zip(self.media, inputs, strict=True))
        return replace(self, media=tuple(media))

    @property
    def pieces(self) -> tuple[Mapping[str, np.ndarray], ...]:
        """The tensors of each of the media, of a rendition that has just been made."""
        return tuple(item.inputs for item in self.media if isinstance(item.inputs, Mapping))

    @property
    def text_bytes(self) -> int:
        """In memory, of all but the tensors."""
        layouts = sum(int(item.layout.positions.nbytes) for item in self.media if item.layout is not None)
        objects = (1 + len(self.media)) * _OBJECT_BYTES
        return sys.getsizeof(self.text) + sys.getsizeof(self.token_ids) + layouts + objects


def media_item(
    offset: int, token_ids: tuple[int, ...], inputs: Mapping[str, np.ndarray], layout: Layout | None, settings: bytes
) -> MediaItem:
    """`settings`: of the processor that made the `inputs`. All that is given counts in the digest, but the offset."""
    digest = blake2b(settings + repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
    arrays = dict(inputs) if layout is None else {**inputs, "layout": layout.positions}
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return MediaItem(digest.digest(), offset, len(token_ids), inputs, layout)
