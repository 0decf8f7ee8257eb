"""Encoder inputs of one image or clip: dropped once they are encoded, made again on demand. Safe for threads.

Those of a full-HD image have 50 MB. Most turns need none: the features of their images are still cached, or the
prefix that holds them is.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import GenerationError, VLLMMLXError
from .limits import ByteRoom
from .rendered import Arrays


class MediaInputs:
    """The encoder inputs of one request's image or clip, for each of its items.

    `remake` starts to make them again on another thread, which ends with `put` or `fail`.
    """

    def __init__(self, digest: bytes, room: ByteRoom, remake: Callable[["MediaInputs"], None]):
        """`digest`: of the rendered media; `room`: for all encoder inputs that wait for the vision encoder."""
        self.digest = digest
        self._room = room
        self._remake = remake
        self._lock = threading.Lock()
        self._arrays: dict[int, Arrays] = {}  # by index of the item
        self._in_room: dict[int, int] = {}  # bytes of the items that have a place in the room
        self._error: VLLMMLXError | None = None
        self._is_being_made = False

    def __del__(self) -> None:
        self._room.leave(sum(self._in_room.values()))

    def offer(self, arrays: Sequence[Arrays]) -> None:
        """Keep those for which there is room."""
        for index, given in enumerate(arrays):
            num_bytes = sum(array.nbytes for array in given.values())
            if self._room.enter(num_bytes):
                self._arrays[index], self._in_room[index] = given, num_bytes

    def put(self, arrays: Sequence[Arrays]) -> None:
        """They were made again, and are kept even if there is no room: the engine waits for them."""
        with self._lock:
            self._arrays.update(enumerate(arrays))
            self._is_being_made = False

    def fail(self, error: VLLMMLXError) -> None:
        with self._lock:
            self._error = error

    def prepare(self, index: int) -> bool:
        with self._lock:
            if index in self._arrays or self._error is not None:
                return True
            starts, self._is_being_made = not self._is_being_made, True
        if starts:
            self._remake(self)
        return False

    def get(self, index: int) -> Arrays:
        """Never waits: it is called on the engine thread, for which all rows would wait."""
        with self._lock:
            if index in self._arrays:
                return self._arrays[index]
            raise self._error or GenerationError("The encoder inputs of an image were not ready before it was encoded.")

    def drop(self, index: int) -> None:
        with self._lock:
            self._arrays.pop(index, None)
            self._room.leave(self._in_room.pop(index, 0))


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
