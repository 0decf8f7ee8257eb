"""The checkpoints that `doctor` recommends: each fits the budget, with a context for coding agents."""

import pytest

from vllm_mlx.cli.recommended import AGENT_CONTEXT, RECOMMENDED, assumed_recommended_bytes, fitting
from vllm_mlx.runner.device import DeviceMemory

GIB = 1 << 30


def budget_of(memory_bytes: int) -> int:
    return DeviceMemory(memory_bytes, assumed_recommended_bytes(memory_bytes)).default_budget_bytes


@pytest.mark.parametrize("size", [8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512])
def test_every_mac_is_recommended_something_that_fits(size: int) -> None:
    budget = budget_of(size * GIB)
    found = fitting(budget)
    assert found
    assert all(one.weights_bytes + AGENT_CONTEXT * one.bytes_per_token < budget for one in found)
    larger = [one for one in RECOMMENDED if one.weights_bytes > found[0].weights_bytes]
    assert all(one.needed_bytes(budget) > budget for one in larger)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert fitting(2 * 10**9) == ()


def test_the_table_is_ordered_and_names_each_checkpoint_once() -> None:
    sizes = [one.weights_bytes for one in RECOMMENDED]
    assert sizes == sorted(sizes) and len({one.name for one in RECOMMENDED}) == len(RECOMMENDED)
