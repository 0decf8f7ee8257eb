"""The seconds of decoding that the scheduler learns from: neither restores nor joins nor captures are among them."""

import time

import mlx.core as mx
import pytest

from tests.support.engine_driver import Driver
from tests.support.rows import cases

PREFIX = [(7 * i) % 500 for i in range(600)]
WAIT_S = 100.0  # of the device, by the clock of this test


class Clock:
    """It only goes on while the engine waits for the device."""

    def __init__(self, wait):
        self._wait = wait
        self.now_s = 0.0

    def wait(self) -> None:
        self.now_s += WAIT_S
        self._wait()


def run_step(driver: Driver) -> tuple[int, int, float | None]:
    """The number of restores and of captures of a step, and the decode time that it measured."""
    engine = driver.engine
    plan = engine.scheduler.schedule()
    output = engine.runner.decode(plan)
    driver.deliver(engine.scheduler.update(output))
    if plan.prefill:
        driver.deliver(engine.scheduler.update(engine.runner.prefill(plan.prefill)))
    return len(plan.restores), len(plan.captures), output.decode_s


@pytest.mark.parametrize("name", cases(["qwen3", "qwen3_5"], ["qwen3"]))
def test_a_restore_and_a_join_are_not_taken_for_decoding(checkpoint, monkeypatch, name):
    driver = Driver(checkpoint(name), max_prefill_chunk=64, max_stall_ms=60_000)
    driver.generate([PREFIX], max_tokens=2)
    driver.add([1, 2, 3], 100)
    while not driver.replies[1].token_ids:
        driver.step()
    clock = Clock(mx.synchronize)
    monkeypatch.setattr(mx, "synchronize", clock.wait)  # as copies of state do, and decoding does not
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    for number in range(3):
        driver.add([*PREFIX, *range(100 + number, 300)], 4)
    steps = []
    while any(not driver.replies[row].finish_reason for row in (2, 3, 4)):
        steps.append(run_step(driver))
    assert sum(restores for restores, _, _ in steps) == 3 and sum(captures for _, captures, _ in steps) >= 1
    measured = [seconds for *_, seconds in steps if seconds is not None]
    assert len(measured) > 3 and set(measured) == {0.0}
