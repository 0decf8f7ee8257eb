"""Chunks while one request is alone, on simulated chips: nearly as quick as the best fixed length, and never long."""

import pytest

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_lanes import Lanes
from tests.support.device_model import Device
from tests.support.device_serving import BUDGET_SHARE, pacer_of
from vllm_mlx.core.step import ChunkTiming
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer

from .computed_runner import device
from .test_turns import Tenants

LENGTH = 20_480
NEAR = 1.05  # times the seconds of the best fixed length
ALONE_S, SHARED_S = 3.0, 1.0  # the longest chunk that is planned
GROWTH = 1.2  # a chunk takes this many times its plan at most: attention grows with each
PAIRS = [
    Device(chip, shape)
    for chip in CHIPS.values()
    for shape in SHAPES.values()
    if shape.weights_bytes < BUDGET_SHARE * chip.memory_bytes
]
FEW = [
    ("M4 Max", "Qwen3.6 35B-A3B"),
    ("M5", "Qwen3.6 35B-A3B"),  # MLX has a kernel for its heads from 1,024 queries on
    ("M1 Ultra", "gpt-oss 120B"),
    ("M2 Max", "Qwen3-Next 80B-A3B"),
    ("M5 Max", "Qwen3.8 27B"),
    ("M2", "Qwen3 8B"),
    ("M4 Pro", "Qwen3 0.6B"),
]


def best_fixed_s(machine: Device) -> float:
    lengths = [64 << power for power in range(6)]
    return min(sum(machine.chunk_s(length, start) for start in range(0, LENGTH, length)) for length in lengths)


def chunks_s(machine: Device, *, is_alone: bool = True) -> list[float]:
    """Seconds of the chunks of a first prompt."""
    pacer, start, seconds = pacer_of(machine), 0, []
    while start < LENGTH:
        end = min(LENGTH, pacer.chunk_end(start, pacer.budget(decoding=False, is_alone=is_alone)))
        seconds.append(machine.chunk_s(end - start, start))
        pacer.observe_chunk(ChunkTiming(start, end - start, seconds[-1]))
        start = end
    return seconds


@pytest.mark.parametrize(("chip", "shape"), FEW)
def test_a_prompt_alone_is_nearly_as_quick_as_with_the_best_fixed_length(chip: str, shape: str) -> None:
    machine = device(chip, shape)
    assert sum(chunks_s(machine)) <= NEAR * best_fixed_s(machine)


@pytest.mark.full
def test_few_pairs_of_all_are_far_from_the_best_fixed_length() -> None:
    """For the others, three seconds do not suffice for a quicker length, or for trying it."""
    ratios = [sum(chunks_s(machine)) / best_fixed_s(machine) for machine in PAIRS]
    assert len(ratios) > 200
    assert sum(ratio > NEAR for ratio in ratios) <= 18
    assert max(ratios) <= 1.61


@pytest.mark.parametrize("machine", PAIRS[::9], ids=lambda machine: f"{machine.chip.name}, {machine.shape.name}")
def test_a_chunk_alone_takes_three_seconds_and_beside_a_request_that_waits_one(machine: Device) -> None:
    shortest_s = machine.chunk_s(64, LENGTH)
    assert max(chunks_s(machine)) <= max(shortest_s, GROWTH * ALONE_S)
    assert max(chunks_s(machine, is_alone=False)) <= max(shortest_s, 2 * GROWTH * SHARED_S), "as the line is out"


def test_a_length_is_tried_on_no_prompt_that_is_shorter() -> None:
    """The trial would be cut by the end of the prompt, teach nothing, and be repeated with each prompt."""
    pacer = PrefillPacer(max_stall_s=0.2, max_chunk=2048, tokens_per_s=1000, overhead_s=0.001)
    alone = pacer.budget(decoding=False, is_alone=True)
    lengths = []
    for num_left in (2000, 2000, 2000, 2048, 2048):
        lengths.append(min(num_left, pacer.chunk_end(0, alone, num_left)))
        pacer.observe_chunk(ChunkTiming(0, lengths[-1], lengths[-1] * (0.001 if lengths[-1] < 1024 else 0.0014)))
    assert lengths == [1024, 512, 512, 2048, 512]


def first_token_s(machine: Device, *, with_chat: bool) -> float:
    """Seconds until the first token of a chat of a second key, or else until that of a long prompt alone."""
    lanes = Lanes(machine)
    if with_chat:
        lanes.send(0, 100, 2, "ben")
        lanes.run(1e9)
    long = lanes.send(0, LENGTH, 2, "ann")
    if not with_chat:
        return lanes.first_token_s(long)
    lanes.run(lanes.clock.now_s + 0.5 * best_fixed_s(machine))
    sent_s = lanes.clock.now_s
    return lanes.first_token_s(lanes.send(0, 200, 2, "ben")) - sent_s


@pytest.mark.parametrize(
    ("chip", "shape", "alone_s", "chat_s"),
    [("M4 Max", "Qwen3.6 35B-A3B", 12.5, 0.5), ("M2 Max", "gpt-oss 120B", 43, 2.0), ("M4 Max", "Qwen3 8B", 37, 0.7)],
)
def test_one_request_alone_takes_long_chunks_and_a_second_key_waits_for_none(
    chip: str, shape: str, alone_s: float, chat_s: float
) -> None:
    """Before one request alone took longer chunks, these were 15.1, 71 and 35 s; the chats took as long."""
    machine = device(chip, shape)
    assert first_token_s(machine, with_chat=False) <= alone_s
    assert first_token_s(machine, with_chat=True) <= 1.02 * chat_s


def test_a_request_that_waits_keeps_the_chunks_of_another_short() -> None:
    """Both have one key. The machine reads 1,000 tokens a second."""
    for num_requests, longest in ((1, 1024), (2, 512)):
        bench = Tenants(max_num_seqs=1)
        for _ in range(num_requests):
            bench.ask("ann", 20_000)
        for _ in range(3):
            bench.step()
        assert max(chunk.end - chunk.start for plan in bench.plans for chunk in plan.prefill) == longest


def test_short_chunks_beside_replies_are_not_expected_to_be_as_quick_as_long_ones() -> None:
    machine = device("M2 Max", "gpt-oss 120B")
    pacer = pacer_of(machine)
    before_s = pacer.chunk_s(64, 0)
    for _ in range(8):
        pacer.observe_chunk(ChunkTiming(0, 2048, machine.chunk_s(2048, 0)))
    assert pacer.chunk_s(64, 0) == before_s == pytest.approx(machine.chunk_s(64, 0), rel=0.1)
