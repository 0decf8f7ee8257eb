"""The real scheduler on simulated Apple chips: what rows of different lengths, and four agents at once, get."""

import json
from pathlib import Path

import pytest

from tests.support.agent_sessions import agents
from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.device_serving import decode_rows, fits, serve_agents

LENGTHS = (60_000, 20_000, 8_000, 2_000)
FLOOR = 1.1  # times the step of one pass over rows that are one group: weights or touched experts once, KV once
CASES = [
    ("M4 Max", "Qwen3 8B"),
    ("M3 Ultra", "Llama 3.3 70B"),
    ("M5 Max", "Qwen3.8 27B"),
    ("M4 Pro", "Qwen3 0.6B"),
    ("M2 Max", "gpt-oss 120B"),
]
# The longest pauses with an earlier pacer: chunks of 16 tokens and more, in 200 ms on every machine.
EARLIER = json.loads((Path(__file__).parent / "pauses.json").read_text())["pauses_s"]
SLOW = (
    ("M4 Max", "Qwen3 32B"),
    ("M1 Max", "Qwen3 30B-A3B"),
    ("M4 Pro", "Qwen3.8 27B"),
    ("M1 Ultra", "GLM-4.5-Air 106B"),
)
AGENTS = 90_000  # tokens of the four agents at their longest


@pytest.mark.parametrize(("chip", "shape"), CASES)
def test_rows_of_any_lengths_share_one_pass_and_copy_nothing(chip: str, shape: str) -> None:
    device = Device(CHIPS[chip], SHAPES[shape])
    after = decode_rows(device, LENGTHS, num_steps=64)
    assert after.passes_per_step == 1
    assert after.copied_bytes == 0
    assert len(LENGTHS) / after.tokens_per_s <= FLOOR * device.decode_s([[LENGTHS]])


def check_pauses(chip: str, shape: str) -> None:
    """No pause is longer than a step and what prefill may add to it: a stall budget, or the shortest chunk."""
    device = Device(CHIPS[chip], SHAPES[shape])
    result = serve_agents(device, agents())
    longest_chunk_s = device.chunk_s(32 if device.chunk_s(32) <= 0.8 * device.chunk_s(64) else 64, AGENTS // 3)
    bound_s = result.longest_decode_s + max(result.stall_s, longest_chunk_s)
    earlier_s = EARLIER[chip][shape]
    assert result.stall_s <= 0.4
    assert result.worst_gap_s <= max(1.25 * bound_s, earlier_s)  # the first chunks at a depth are not foreseen well
    assert result.worst_gap_s <= 1.7 * earlier_s


@pytest.mark.parametrize(
    ("chip", "shape"), [SLOW[0], *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW[1:])]
)
def test_the_longest_pause_beside_a_prompt_is_a_step_and_a_stall_budget(chip: str, shape: str) -> None:
    check_pauses(chip, shape)


@pytest.mark.full
@pytest.mark.parametrize("chip", CHIPS)
def test_so_it_is_on_every_machine(chip: str) -> None:
    for shape in SHAPES:
        if fits(Device(CHIPS[chip], SHAPES[shape]), AGENTS):
            check_pauses(chip, shape)
