"""However unlike the lengths of rows are, a step reads the weights once, and no row's keys and values are copied."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_driver import Driver, plain_loop
from tests.support.rows import cases
from vllm_mlx.cache import layers
from vllm_mlx.runner.model import Model
from vllm_mlx.scheduler import decode_groups

LENGTHS = (700, 360, 20)  # too unlike to become one group
NUM_TOKENS = 20


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5", "glm4_moe_lite"], ["qwen3_5"]))
def test_rows_that_join_and_leave_share_one_forward_pass(
    checkpoint: Callable[..., Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_passes = 0
    decode = Model.decode

    def counting(self: Model, *inputs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return decode(self, *inputs)

    def refused(*_: Any) -> None:
        raise AssertionError("a row was copied")

    monkeypatch.setattr(decode_groups, "READ_BYTES", 1 << 16)  # as if padding of this small model cost much
    path = checkpoint(architecture)
    driver = Driver(path, max_stall_ms=60_000)
    monkeypatch.setattr(Model, "decode", counting)
    for copies in ("merge", "keep", "extract"):
        monkeypatch.setattr(layers, copies, refused)
    prompts = [[(7 * length + 3 * place) % 500 + 5 for place in range(length)] for length in LENGTHS]
    for index, prompt in enumerate(prompts):
        driver.add(prompt, max_tokens=NUM_TOKENS - 5 * index)
    most = 0
    while driver.engine.has_work:
        before = num_passes
        driver.step()
        assert num_passes - before <= 1
        most = max(most, *(len(batch.seqs) for batch in driver.engine.runner.batches), 0)
    assert most == len(LENGTHS)
    for index, prompt in enumerate(prompts):
        expected, _ = plain_loop(path, prompt, NUM_TOKENS - 5 * index)
        assert driver.replies[index].token_ids == expected


def test_no_row_is_preempted_for_the_padding_of_a_group(checkpoint: Callable[..., Path]) -> None:
    path, lengths, num_tokens = checkpoint("qwen3"), (640, 440), 20
    row = Driver(path).engine.default.facts.footprint
    driver = Driver(path, rows_bytes=sum(row.bytes_at(length + num_tokens + 1) for length in lengths))
    driver.generate([[3 * place % 500 for place in range(length)] for length in lengths], max_tokens=num_tokens)
    assert [seq.num_preemptions for seq in driver.seqs.values()] == [0, 0]
