"""Encoder inputs wait for the vision encoder as far as there is room, and are made again on demand."""

from concurrent.futures import Future

import numpy as np
import pytest

from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.core.memory import ByteRoom
from vllm_mlx.media.rendered import ItemInputs, MediaInputs, RenderedMedia, media_item

PIECES = [{"pixel_values": np.full(10, number, np.uint8)} for number in range(3)]
RENDERED = RenderedMedia.of("", 0, (1,), tuple(media_item(0, (1,), piece, None, b"") for piece in PIECES))


class Maker:
    """Notes each time that inputs are to be made again."""

    def __init__(self) -> None:
        self.made: list[Future[RenderedMedia]] = []

    def __call__(self) -> "Future[RenderedMedia]":
        self.made.append(Future())
        return self.made[-1]


def test_inputs_without_room_are_made_once() -> None:
    maker = Maker()
    inputs = MediaInputs(maker, ByteRoom(20), PIECES)
    first, third = ItemInputs(inputs, 0), ItemInputs(inputs, 2)
    assert not first.prepare() and not third.prepare() and len(maker.made) == 1
    maker.made[0].set_result(RENDERED)
    assert third.prepare() and third.get()["pixel_values"][0] == 2
    assert first.prepare() and first.get()["pixel_values"][0] == 0 and len(maker.made) == 1


def test_encoded_inputs_give_their_room_back_and_can_be_made_again() -> None:
    shared, maker = ByteRoom(30), Maker()
    inputs = MediaInputs(maker, shared, PIECES)
    pieces = [ItemInputs(inputs, index) for index in range(3)]
    for piece in (*pieces, *pieces):
        piece.drop()
    assert shared.num_bytes == 0
    assert not pieces[1].prepare()
    maker.made[0].set_result(RENDERED)
    assert pieces[1].prepare() and pieces[1].get()["pixel_values"][0] == 1


def test_inputs_that_are_never_encoded_give_their_room_back() -> None:
    shared = ByteRoom(30)
    inputs = MediaInputs(Maker(), shared, PIECES)
    assert shared.num_bytes == 30
    del inputs
    assert shared.num_bytes == 0


def test_an_error_of_making_them_is_raised_and_does_not_stay() -> None:
    maker = Maker()
    piece = ItemInputs(MediaInputs(maker, ByteRoom()), 0)
    assert not piece.prepare()
    maker.made[0].set_exception(InvalidImage("it is gone."))
    assert piece.prepare()
    with pytest.raises(InvalidImage, match="gone"):
        piece.get()
    assert not piece.prepare() and len(maker.made) == 2
