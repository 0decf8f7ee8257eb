"""A picture as a model is shown it: text, ids and tensors. Knows neither its processor nor a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ..core.sequence import Layout, MediaItem, PromptInputs

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Rendition:
    text: str  # stands for it in a rendered conversation
    num_lead_chars: int  # of the text, before the placeholders
    token_ids: tuple[int, ...]  # from the first placeholder to the last
    media: tuple[MediaItem, ...]  # offsets are from the first placeholder
    digest: bytes  # of all that the model is shown

    @classmethod
    def of(
        cls, text: str, num_lead_chars: int, token_ids: tuple[int, ...], media: tuple[MediaItem, ...]
    ) -> "Rendition":
        digest = blake2b(repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
        for item in media:
            digest.update(item.digest)
        return cls(text, num_lead_chars, token_ids, media, digest.digest())

    def placed(self, offset: int) -> tuple[MediaItem, ...]:
        return tuple(replace(item, offset=item.offset + offset) for item in self.media)

    def alone(self) -> PromptInputs:
        return PromptInputs(token_ids=self.token_ids, media=self.media)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for item in self.media for array in item.inputs.values())


def medium(
    offset: int, token_ids: tuple[int, ...], inputs: Mapping[str, np.ndarray], layout: Layout | None, settings: bytes
) -> MediaItem:
    """`settings`: of the processor that made the `inputs`. All that is given counts in the digest, but the offset."""
    digest = blake2b(settings + repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
    arrays = dict(inputs) if layout is None else {**inputs, "layout": layout.positions}
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return MediaItem(digest.digest(), offset, len(token_ids), inputs, layout)
