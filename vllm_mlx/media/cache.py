"""Images and clips of the last turns, decoded and rendered, and what addresses last led to. Reads no clock.

A conversation comes back with every turn.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from .clip import Clip
from .fetch import Fetched
from .image import DecodedImage, Seen
from .rendered import RenderedMedia

Address = tuple[bytes, str, str]  # salt, URL, and what it was asked as
_MAX_ADDRESSES = 1000
_MAX_ADDRESS_CHARS = 8192
_MAX_SEEN = 10_000


class DecodedCache:
    """By salt and digest of what they were decoded from, so none can be out of date. The longest unused go first."""

    def __init__(self, *, max_bytes: int):
        self._max_bytes = self._room_bytes = max_bytes
        self._pictures: OrderedDict[bytes, DecodedImage | Clip] = OrderedDict()
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self.num_bytes = 0

    def get(self, content: bytes, *, whole: bool = True) -> DecodedImage | Clip | Seen | None:
        """`whole`: with its pixels."""
        picture = self._pictures.get(content)
        if picture is not None:
            self._pictures.move_to_end(content)
            return picture
        seen = None if whole else self._seen.get(content)
        if seen is not None:
            self._seen.move_to_end(content)
        return seen

    def make_room(self, in_use_bytes: int) -> None:
        """Pixels in use take their part of the budget first. What is kept has what they leave."""
        self._room_bytes = max(0, self._max_bytes - in_use_bytes)
        self._shrink()

    def put(self, content: bytes, picture: DecodedImage | Clip | Seen) -> None:
        if isinstance(picture, Seen):
            return
        self._seen[content] = Seen(picture.digest, picture.num_pixels)
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        if content in self._pictures or picture.pixels.nbytes > self._room_bytes:
            return
        self._pictures[content] = picture
        self.num_bytes += picture.pixels.nbytes
        self._shrink()

    def _shrink(self) -> None:
        while self.num_bytes > self._room_bytes:
            _, dropped = self._pictures.popitem(last=False)
            self.num_bytes -= dropped.pixels.nbytes


@dataclass(frozen=True, slots=True)
class KnownAddress:
    """What an address led to: an answer of HTTP, and the digest of the data that it was."""

    answer: Fetched
    content: bytes
    fresh_until_s: float


class KnownAddresses:
    """The longest unused go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Address, KnownAddress] = OrderedDict()

    def get(self, address: Address) -> KnownAddress | None:
        known = self._known.get(address)
        if known is not None:
            self._known.move_to_end(address)
        return known

    def put(self, address: Address, answer: Fetched, content: bytes, now: float) -> None:
        """The data itself is not kept, nor anything of an address that is far too long."""
        self._known.pop(address, None)
        if len(address[1]) + len(answer.url) > _MAX_ADDRESS_CHARS:
            return
        self._known[address] = KnownAddress(replace(answer, data=None), content, now + answer.fresh_s)
        if len(self._known) > _MAX_ADDRESSES:
            self._known.popitem(last=False)


Key = tuple[str, bytes, int | None]  # salt, digest of a picture or a clip, and the longest side that is shown


class RenderedCache:
    def __init__(self, *, max_bytes: int = 0):
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Key, RenderedMedia] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> RenderedMedia | None:
        """Its media have no inputs."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def put(self, key: Key, rendition: RenderedMedia) -> None:
        with self._lock:
            if key in self._kept or rendition.text_bytes > self.max_bytes:
                return
            self._kept[key] = replace(rendition, media=tuple(replace(item, inputs={}) for item in rendition.media))
            self.num_bytes += rendition.text_bytes
            while self.num_bytes > self.max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.text_bytes
