"""Rendered images and videos as JSON, for a journal, and back. Their encoder inputs are left out."""

from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.sequence import Layout, MediaItem
from ..disk.packed import packed_array, packed_ids, packed_text, unpacked_array, unpacked_ids, unpacked_text
from .rendered import RenderedMedia

Key = tuple[bytes, int | None]  # the content of a file, and the `max_side` of an image
MALFORMED = (ValueError, TypeError, KeyError, OverflowError)
_POSITIONS = np.dtype(np.int32)
_AXES = 3


def name_of(key: Key) -> str:
    content, max_side = key
    return blake2b(content + f" {max_side}".encode(), digest_size=12).hexdigest()


def rendering_value(key: Key, rendered: RenderedMedia) -> dict[str, Any]:
    content, max_side = key
    return {
        "content": content.hex(),
        "max_side": max_side,
        "text": packed_text(rendered.text),
        "num_lead_chars": rendered.num_lead_chars,
        "ids": packed_ids(rendered.token_ids),
        "items": [_item_value(item) for item in rendered.items],
        "num_pixels": rendered.num_pixels,
    }


def rendering_of(value: dict[str, Any]) -> tuple[Key, RenderedMedia]:
    """Raises one of `MALFORMED`."""
    rendered = RenderedMedia.of(
        unpacked_text(value["text"]),
        value["num_lead_chars"],
        tuple(unpacked_ids(value["ids"])),
        tuple(map(_item_of, value["items"])),
        value["num_pixels"],
    )
    return (bytes.fromhex(value["content"]), value["max_side"]), rendered


def _item_value(item: MediaItem) -> list[Any]:
    layout = None
    if item.layout is not None:
        assert item.layout.positions.dtype == _POSITIONS and len(item.layout.positions) == _AXES
        layout = [packed_array(item.layout.positions), item.layout.advance]
    return [item.digest.hex(), item.offset, item.length, layout]


def _item_of(value: list[Any]) -> MediaItem:
    digest, offset, length, layout = value
    if layout is not None:
        positions, advance = layout
        layout = Layout(unpacked_array(positions, _POSITIONS).reshape(_AXES, -1), advance)
    return MediaItem(bytes.fromhex(digest), offset, length, {}, layout)
