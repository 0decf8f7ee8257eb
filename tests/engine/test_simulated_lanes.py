"""The real engine with several models on a simulated chip: who gets the time, and how long replies pause."""

import pytest

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_lanes import Lanes
from tests.support.device_model import Device

PAIRS = [
    ("M4 Max", "Qwen3 8B", "Qwen3 0.6B"),
    ("M4 Max", "Qwen3 30B-A3B", "Qwen3 4B"),
    ("M4 Max", "Qwen3 32B", "Qwen3 4B"),
    ("M1 Max", "Qwen3 8B", "Qwen3 4B"),
]
USUAL = [*PAIRS[1::2], *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS[::2])]
LONG = 1 << 17  # tokens of a prompt or a reply that does not end meanwhile


def lanes_of(chip: str, *shapes: str) -> Lanes:
    return Lanes(*(Device(CHIPS[chip], SHAPES[shape]) for shape in shapes))


@pytest.mark.parametrize("reading", [(0,), (1,), (0, 1)], ids=["large reads", "small reads", "both read"])
@pytest.mark.parametrize(
    ("chip", "large", "small"), [*PAIRS[1::2], *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS[::2])]
)
def test_two_busy_models_share_the_time_and_no_reply_waits_long(
    chip: str, large: str, small: str, reading: tuple[int, ...]
) -> None:
    """Both have three replies, and one or both read a long prompt besides."""
    lanes = lanes_of(chip, large, small)
    replies = [[lanes.send(model, 100 + 50 * number, LONG) for number in range(3)] for model in range(2)]
    lanes.run(until_s=5)
    begun_s = list(lanes.busy_s)
    for model in reading:
        lanes.send(model, LONG, 10)
    lanes.run(until_s=20)
    served_s = [end - begin for begin, end in zip(begun_s, lanes.busy_s, strict=True)]
    assert all(0.4 <= one / sum(served_s) <= 0.6 for one in served_s)
    decode_s = [device.decode_s([[[1000], [1000], [1000]]]) for device in lanes.devices]
    shortest_s = max(device.chunk_s(32, 700) + step_s for device, step_s in zip(lanes.devices, decode_s, strict=True))
    for model in range(2):
        bound_s = max(lanes.engine.models[model].scheduler.prefill.stall_s, shortest_s) + decode_s[1 - model]
        for since_s, part in ((5, 1.02), (0, 1.1)):  # several short prompts in one step are not foreseen as well
            assert max(lanes.worst_gap_s(reply, since_s) for reply in replies[model]) <= part * bound_s


@pytest.mark.parametrize("num_tokens", [200, 400])
@pytest.mark.parametrize(
    ("chip", "large", "small"), [*PAIRS[1::2], *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS[::2])]
)
def test_the_first_token_beside_four_long_replies_of_another_model(
    chip: str, large: str, small: str, num_tokens: int
) -> None:
    for shapes in ((large, small), (small, large)):
        alone = lanes_of(chip, *shapes)
        alone_s = alone.first_token_s(alone.send(1, num_tokens, 10))
        beside = lanes_of(chip, *shapes)
        for number in range(4):
            beside.send(0, 1000 + 500 * number, LONG)
        beside.run(until_s=12)
        sent_s = beside.clock.now_s
        first_s = beside.first_token_s(beside.send(1, num_tokens, 10)) - sent_s
        assert first_s <= 2 * alone_s + beside.engine.models[0].scheduler.prefill.stall_s


def test_three_models_that_all_read_and_reply_get_a_third_each() -> None:
    lanes = lanes_of("M4 Max", "Qwen3 8B", "Qwen3 4B", "Qwen3 0.6B")
    for model in range(3):
        lanes.send(model, 200, LONG)
    lanes.run(until_s=2)
    begun_s = list(lanes.busy_s)
    for model in range(3):
        lanes.send(model, LONG, 10)
    lanes.run(until_s=20)
    served_s = [end - begin for begin, end in zip(begun_s, lanes.busy_s, strict=True)]
    assert all(0.25 <= one / sum(served_s) <= 0.42 for one in served_s)


@pytest.mark.parametrize(
    ("chip", "large", "small"), [PAIRS[1], *(pytest.param(*PAIRS[at], marks=pytest.mark.full) for at in (0, 2, 3))]
)
def test_the_first_token_of_a_fill_in_beside_a_long_prompt_of_another_model(chip: str, large: str, small: str) -> None:
    """It comes at any moment of the prefill of 20,000 tokens."""
    alone = lanes_of(chip, large, small)
    alone_s = alone.first_token_s(alone.send(1, 300, 10))
    beside = lanes_of(chip, large, small)
    chat = beside.send(0, 20_000, 10)
    while True:
        beside.run(until_s=beside.clock.now_s + 1.3)
        sent_s = beside.clock.now_s
        if beside.heard[chat]:
            break
        first_s = beside.first_token_s(beside.send(1, 300, 10)) - sent_s
        assert first_s <= 2 * alone_s + beside.engine.models[0].scheduler.prefill.stall_s
    assert beside.num_sent > 5
