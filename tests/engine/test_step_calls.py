"""Functions that a decode step calls: what Python costs beside the device, whatever else runs on the machine."""

import sys
from statistics import median
from types import FrameType

import vllm_mlx
from tests.support.engine_driver import Driver
from vllm_mlx.runner.checkpoint import DEMO_PATH

PACKAGE = vllm_mlx.__path__[0]
MOST_CALLS = 465  # of functions of the package, and of functions in C by them; more is slower on every machine


def num_calls(driver: Driver) -> int:
    """The calls of one step, and of what the engine thread does after it."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        driver.step()
        driver.engine.move()
    finally:
        sys.setprofile(None)
    return calls


def test_a_decode_step_of_four_rows_calls_few_functions() -> None:
    driver = Driver(DEMO_PATH, num_draft_tokens=0)
    for row in range(4):
        driver.add([50 + row] * 8, max_tokens=100)
    while min(seq.num_output_tokens for seq in driver.seqs.values()) < 40:
        driver.step()
    counts = [num_calls(driver) for _ in range(20)]
    assert median(counts) <= MOST_CALLS, "what is asked in each step must be able to change in each step"
    assert sorted(counts)[2] == sorted(counts)[-3], "each step does the same"
