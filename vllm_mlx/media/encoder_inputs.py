"""What the tower takes of one picture or clip: there until it has run, and made again should it run anew.

Tensors of a full-HD picture have 50 MB. Most turns of a conversation need none: what the tower made of its pictures is
still there, or the prefix that holds them. Safe to share between threads.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import GenerationError, VLLMMLXError
from .limits import ByteRoom

Pieces = Sequence[Mapping[str, Any]]


class MediaInputs:
    """Of one request's picture or clip, in the pieces that the tower takes one by one.

    `remake` begins to make them again, on a thread of its own, and ends with `put` or `fail`.
    """

    def __init__(self, digest: bytes, room: ByteRoom, remake: Callable[["MediaInputs"], None]):
        """`digest`: of the rendition that they belong to; `room`: of all tensors that wait for the tower."""
        self.digest = digest
        self._room = room
        self._remake = remake
        self._lock = threading.Lock()
        self._pieces: dict[int, Mapping[str, Any]] = {}
        self._in_room: dict[int, int] = {}  # bytes of the pieces that have a place there
        self._error: VLLMMLXError | None = None
        self._is_asked = False

    def __del__(self) -> None:
        self._room.leave(sum(self._in_room.values()))

    def offer(self, pieces: Pieces) -> None:
        """Those for which there is no room are let go."""
        for index, piece in enumerate(pieces):
            num_bytes = sum(array.nbytes for array in piece.values())
            if self._room.enter(num_bytes):
                self._pieces[index], self._in_room[index] = piece, num_bytes

    def put(self, pieces: Pieces) -> None:
        with self._lock:
            self._pieces.update(enumerate(pieces))
            self._is_asked = False

    def fail(self, error: VLLMMLXError) -> None:
        with self._lock:
            self._error = error

    def prepare(self, index: int) -> bool:
        with self._lock:
            if self._is_there(index):
                return True
            asks, self._is_asked = not self._is_asked, True
        if asks:
            self._remake(self)
        return False

    def get(self, index: int) -> Mapping[str, Any]:
        """Never waits: called on the engine thread, for which all rows would wait."""
        with self._lock:
            if index in self._pieces:
                return self._pieces[index]
            raise self._error or GenerationError("The tensors of an image were not made ready before it was encoded.")

    def drop(self, index: int) -> None:
        with self._lock:
            self._pieces.pop(index, None)
            self._room.leave(self._in_room.pop(index, 0))

    def _is_there(self, index: int) -> bool:
        return index in self._pieces or self._error is not None


@dataclass(frozen=True, slots=True)
class PieceInputs:
    """`core.sequence.EncoderInputs` of one piece."""

    tensors: MediaInputs
    index: int

    def prepare(self) -> bool:
        return self.tensors.prepare(self.index)

    def get(self) -> Mapping[str, Any]:
        return self.tensors.get(self.index)

    def drop(self) -> None:
        self.tensors.drop(self.index)
