"""What pictures and clips of the last turns stand for in a prompt, without their tensors, within a number of bytes.

The longest unused go first. Keyed by salt too: requests of different salts share nothing that is kept. Safe to share
between threads.
"""

import threading
from collections import OrderedDict
from dataclasses import replace

from .rendition import Rendition

Key = tuple[str, bytes, int | None]  # salt, digest of a picture or a clip, and the longest side that is shown


class Renditions:
    def __init__(self, *, max_bytes: int = 0):
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Key, Rendition] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Rendition | None:
        """Its media have no inputs."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def put(self, key: Key, rendition: Rendition) -> None:
        with self._lock:
            if key in self._kept or rendition.text_bytes > self.max_bytes:
                return
            self._kept[key] = replace(rendition, media=tuple(replace(item, inputs={}) for item in rendition.media))
            self.num_bytes += rendition.text_bytes
            while self.num_bytes > self.max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.text_bytes
