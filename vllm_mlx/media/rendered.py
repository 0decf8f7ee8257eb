"""One image or video as its model reads it: text, token ids and encoder inputs. Knows no processor, no conversation."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.sequence import EncoderInputs, Layout, MediaItem, PromptInputs

Arrays = Mapping[str, np.ndarray]  # encoder inputs of one item, by name
_DIGEST_BYTES = 16
_OBJECT_BYTES = 1000  # size of one object of rendered media and of each of its items, beside texts and arrays


@dataclass(frozen=True, slots=True, eq=False)
class RenderedMedia:
    text: str  # replaces the marker in a rendered conversation
    num_lead_chars: int  # characters of the text before the placeholders
    token_ids: tuple[int, ...]  # from the first placeholder to the last
    items: tuple[MediaItem, ...]  # offsets are from the first placeholder
    digest: bytes  # a digest of everything that the model reads

    @classmethod
    def of(
        cls, text: str, num_lead_chars: int, token_ids: tuple[int, ...], items: tuple[MediaItem, ...]
    ) -> "RenderedMedia":
        digest = blake2b(repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
        for item in items:
            digest.update(item.digest)
        numbers: dict[int, int] = {}  # so that the id of a thousand placeholders is one object
        token_ids = tuple(numbers.setdefault(token_id, token_id) for token_id in token_ids)
        return cls(text, num_lead_chars, token_ids, items, digest.digest())

    def placed(self, offset: int) -> tuple[MediaItem, ...]:
        """The items in a prompt whose token at `offset` is the first placeholder."""
        return tuple(replace(item, offset=item.offset + offset) for item in self.items)

    def alone(self) -> PromptInputs:
        return PromptInputs(token_ids=self.token_ids, media=self.items)

    def with_inputs(self, inputs: Iterable[Mapping[str, Any] | EncoderInputs]) -> "RenderedMedia":
        """`inputs`: of each item."""
        items = (replace(item, inputs=given) for item, given in zip(self.items, inputs, strict=True))
        return replace(self, items=tuple(items))

    @property
    def arrays(self) -> tuple[Arrays, ...]:
        """The encoder inputs of each item, if they are held directly."""
        return tuple(item.inputs for item in self.items if isinstance(item.inputs, Mapping))

    @property
    def text_bytes(self) -> int:
        """Bytes in memory, without the encoder inputs."""
        layouts = sum(int(item.layout.positions.nbytes) for item in self.items if item.layout is not None)
        objects = (1 + len(self.items)) * _OBJECT_BYTES
        return sys.getsizeof(self.text) + sys.getsizeof(self.token_ids) + layouts + objects


def media_item(
    offset: int, token_ids: tuple[int, ...], inputs: Arrays, layout: Layout | None, settings: bytes
) -> MediaItem:
    """`settings`: of the processor that made the inputs. The digest covers every argument but the offset."""
    digest = blake2b(settings + repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
    arrays = dict(inputs) if layout is None else {**inputs, "layout": layout.positions}
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return MediaItem(digest.digest(), offset, len(token_ids), inputs, layout)
