"""One image or video as its model reads it: text, token ids and encoder inputs. Knows no processor, no conversation.

The encoder inputs of a full-HD image take 50 MB, and most turns need none, because the features of their images or the
prefix with the images are still cached. So encoder inputs are dropped once they are encoded, and made again on demand.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.memory import ByteRoom
from ..core.sequence import EncoderInputs, Layout, MediaItem, PromptInputs

Arrays = Mapping[str, np.ndarray]  # encoder inputs of one item, by name
_DIGEST_BYTES = 16
_OBJECT_BYTES = 1000  # size of one object of rendered media and of each of its items, without texts and arrays


@dataclass(frozen=True, slots=True, eq=False)
class RenderedMedia:
    text: str  # replaces the marker in a rendered conversation
    num_lead_chars: int  # characters of the text before the placeholders
    token_ids: tuple[int, ...]  # from the first placeholder to the last
    items: tuple[MediaItem, ...]  # offsets are from the first placeholder
    digest: bytes  # a digest of everything that the model reads
    num_pixels: int  # the size of the decoded image or clip

    @classmethod
    def of(
        cls,
        text: str,
        num_lead_chars: int,
        token_ids: tuple[int, ...],
        items: tuple[MediaItem, ...],
        num_pixels: int = 0,
    ) -> "RenderedMedia":
        digest = blake2b(repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
        for item in items:
            digest.update(item.digest)
        numbers: dict[int, int] = {}  # so that the id of a thousand placeholders is one object
        token_ids = tuple(numbers.setdefault(token_id, token_id) for token_id in token_ids)
        return cls(text, num_lead_chars, token_ids, items, digest.digest(), num_pixels)

    def placed(self, offset: int) -> tuple[MediaItem, ...]:
        """Return the items for a prompt whose token at `offset` is the first placeholder."""
        return tuple(replace(item, offset=item.offset + offset) for item in self.items)

    def alone(self) -> PromptInputs:
        return PromptInputs(token_ids=self.token_ids, media=self.items)

    def with_inputs(self, inputs: Iterable[Mapping[str, Any] | EncoderInputs]) -> "RenderedMedia":
        """Return the same rendering with other encoder inputs, one entry for each item."""
        items = (replace(item, inputs=given) for item, given in zip(self.items, inputs, strict=True))
        return replace(self, items=tuple(items))

    @property
    def arrays(self) -> tuple[Arrays, ...]:
        """Return the encoder inputs of each item that holds them directly."""
        return tuple(item.inputs for item in self.items if isinstance(item.inputs, Mapping))

    @property
    def text_bytes(self) -> int:
        """Return bytes in memory, without the encoder inputs."""
        layouts = sum(int(item.layout.positions.nbytes) for item in self.items if item.layout is not None)
        objects = (1 + len(self.items)) * _OBJECT_BYTES
        return sys.getsizeof(self.text) + sys.getsizeof(self.token_ids) + layouts + objects


def media_item(
    offset: int, token_ids: tuple[int, ...], inputs: Arrays, layout: Layout | None, settings: bytes
) -> MediaItem:
    """Return an item whose digest covers all arguments except the offset; `settings`: those of the processor."""
    digest = blake2b(settings + repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
    arrays = dict(inputs) if layout is None else {**inputs, "layout": layout.positions}
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return MediaItem(digest.digest(), offset, len(token_ids), inputs, layout)


class MediaInputs:
    """The encoder inputs of one request's image or clip, for each of its items. Used on the engine thread.

    They wait for the encoder if there is room. Otherwise, and if the encoder has to run again, `make` starts to compute
    them on other threads.
    """

    def __init__(self, make: Callable[[], "Future[RenderedMedia]"], room: ByteRoom, arrays: Sequence[Arrays] = ()):
        """`room`: the budget of all encoder inputs that wait; `arrays`: the known ones, for each item."""
        num_bytes = sum(array.nbytes for given in arrays for array in given.values())
        has_room = room.enter(num_bytes)
        self._make = make
        self._making: Future[RenderedMedia] | None = None
        self._room, self._room_bytes = room, num_bytes if has_room else 0
        self._arrays: dict[int, Arrays] = dict(enumerate(arrays)) if has_room else {}  # by index of the item

    def __del__(self) -> None:
        self._room.leave(self._room_bytes)

    def prepare(self, index: int) -> bool:
        if index not in self._arrays and self._making is None:
            self._making = self._make()
        return index in self._arrays or (self._making is not None and self._making.done())

    def get(self, index: int) -> Arrays:
        if index not in self._arrays:
            assert self._making is not None, "`prepare` has returned True"
            making, self._making = self._making, None
            self._arrays = dict(enumerate(making.result(timeout=0).arrays))
        return self._arrays[index]

    def drop(self, index: int) -> None:
        self._arrays.pop(index, None)
        if not self._arrays:
            self._room.leave(self._room_bytes)
            self._room_bytes = 0


@dataclass(frozen=True, slots=True)
class ItemInputs:
    """The `core.sequence.EncoderInputs` of one item."""

    inputs: MediaInputs
    index: int

    def prepare(self) -> bool:
        return self.inputs.prepare(self.index)

    def get(self) -> Mapping[str, Any]:
        return self.inputs.get(self.index)

    def drop(self) -> None:
        self.inputs.drop(self.index)
