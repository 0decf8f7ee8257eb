"""Encoder inputs wait for the vision encoder as far as there is room, and are made again on demand."""

import numpy as np
import pytest

from vllm_mlx.core.errors import GenerationError, InvalidImage
from vllm_mlx.media.limits import ByteRoom
from vllm_mlx.media.rendered import ItemInputs, MediaInputs

PIECES = [{"pixel_values": np.full(10, number, np.uint8)} for number in range(3)]


def test_what_has_no_room_is_asked_for_once() -> None:
    asked: list[MediaInputs] = []
    tensors = MediaInputs(b"", ByteRoom(20), asked.append)
    tensors.offer(PIECES)
    first, _, third = (ItemInputs(tensors, index) for index in range(3))
    assert first.prepare() and not third.prepare() and not third.prepare()
    assert asked == [tensors]
    tensors.put(PIECES)
    assert third.prepare() and third.get()["pixel_values"][0] == 2


def test_what_the_tower_took_gives_its_room_back_and_can_be_had_again() -> None:
    shared = ByteRoom(30)
    tensors = MediaInputs(b"", shared, lambda again: again.put(PIECES))
    tensors.offer(PIECES)
    piece = ItemInputs(tensors, 1)
    piece.drop()
    piece.drop()
    assert shared.num_bytes == 20
    assert not piece.prepare() and piece.prepare() and piece.get()["pixel_values"][0] == 1
    del tensors, piece
    assert shared.num_bytes == 0


def test_the_engine_thread_never_waits_for_them() -> None:
    piece = ItemInputs(MediaInputs(b"", ByteRoom(0), lambda tensors: None), 2)
    assert not piece.prepare()
    with pytest.raises(GenerationError, match="not ready"):
        piece.get()


@pytest.mark.parametrize("error", [InvalidImage("it is gone."), GenerationError("shutting down")])
def test_what_cannot_be_made_again_is_said(error: Exception) -> None:
    piece = ItemInputs(MediaInputs(b"", ByteRoom(0), lambda tensors: tensors.fail(error)), 0)
    assert not piece.prepare() and piece.prepare()
    with pytest.raises(type(error)):
        piece.get()
