"""Caches for the next turn, which brings the same images back: pixels, rendered media, and what addresses led to.

All are keyed by salt too: requests of different salts share nothing. Reads no clock.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .fetch import Fetched
from .pixels import Decoded, Fingerprint
from .rendered import RenderedMedia

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Address = tuple[bytes, str, str]  # salt, URL, and the kind of file that was expected there
RenderedKey = tuple[str, bytes, int | None]  # salt, digest of the pixels, and `max_side` of the image part
_MAX_ADDRESSES = 1000
_MAX_ADDRESS_CHARS = 8192
_MAX_FINGERPRINTS = 10_000


class LRU(Generic[K, V]):
    """Values whose sizes add up to at most `max_size`; the least recently used is dropped first. One thread."""

    def __init__(self, max_size: int, size_of: Callable[[V], int] = lambda value: 1):
        self.max_size = max_size
        self.size = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """A value larger than `max_size` is not kept, and drops no other."""
        self.drop(key)
        if self._size_of(value) <= self.max_size:
            self._values[key] = value
            self.size += self._size_of(value)
            self.resize(self.max_size)

    def drop(self, key: K) -> None:
        if (value := self._values.pop(key, None)) is not None:
            self.size -= self._size_of(value)

    def resize(self, max_size: int) -> None:
        self.max_size = max_size
        while self.size > max_size:
            self.drop(next(iter(self._values)))


class DecodedCache:
    """Decoded images and clips, by salt and digest of the file, so none can be out of date. Used on one event loop.

    Fingerprints stay longer than pixels: to know what was rendered before, no pixels are needed.
    """

    def __init__(self, *, max_bytes: int):
        self._max_bytes = max_bytes
        self._pixels: LRU[bytes, Decoded] = LRU(max_bytes, lambda decoded: decoded.pixels.nbytes)
        self._fingerprints: LRU[bytes, Fingerprint] = LRU(_MAX_FINGERPRINTS)

    @property
    def num_bytes(self) -> int:
        return self._pixels.size

    def get(self, content: bytes) -> Decoded | None:
        return self._pixels.get(content)

    def fingerprint(self, content: bytes) -> Fingerprint | None:
        return self._fingerprints.get(content)

    def put(self, content: bytes, decoded: Decoded) -> None:
        self._fingerprints.put(content, Fingerprint(decoded.digest, decoded.num_pixels))
        self._pixels.put(content, decoded)

    def make_room(self, in_use_bytes: int) -> None:
        """Pixels in use take their part of the budget first; cached ones have the rest."""
        self._pixels.resize(max(0, self._max_bytes - in_use_bytes))


class RenderedCache:
    """Rendered media without their encoder inputs. Safe to share between threads."""

    def __init__(self, *, max_bytes: int = 0):
        self._rendered: LRU[RenderedKey, RenderedMedia] = LRU(max_bytes, lambda rendered: rendered.text_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._rendered.size

    def get(self, key: RenderedKey) -> RenderedMedia | None:
        """Its items have no inputs."""
        with self._lock:
            return self._rendered.get(key)

    def put(self, key: RenderedKey, rendered: RenderedMedia) -> None:
        with self._lock:
            self._rendered.put(key, rendered.with_inputs({} for _ in rendered.items))

    def resize(self, max_bytes: int) -> None:
        with self._lock:
            self._rendered.resize(max_bytes)


@dataclass(frozen=True, slots=True)
class KnownAddress:
    """What an address led to."""

    answer: Fetched  # without its data
    content: bytes  # salt and digest of the data
    fresh_until_s: float


class KnownAddresses:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._known: LRU[Address, KnownAddress] = LRU(_MAX_ADDRESSES)

    def get(self, address: Address) -> KnownAddress | None:
        return self._known.get(address)

    def put(self, address: Address, answer: Fetched, content: bytes, now: float) -> None:
        """`now`: in the clock of `fresh_until_s`. An address that is far too long is not kept."""
        if len(address[1]) + len(answer.url) > _MAX_ADDRESS_CHARS:
            self._known.drop(address)
            return
        self._known.put(address, KnownAddress(replace(answer, data=None), content, now + answer.fresh_s))
