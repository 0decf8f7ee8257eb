"""The buffers of a row's keys and values: allocated once for the whole prompt, however many chunks compute it."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engine_driver import Driver
from tests.support.rows import cases
from vllm_mlx.cache.layers import Kind, kind, leaves
from vllm_mlx.core.memory import allocated_slots

CHUNK = 64
WINDOW_SLACK = 3 * CHUNK  # a window of these checkpoints, a chunk beside it, and the copy that cuts it back


def prompt(length: int) -> list[int]:
    return [(7 * i) % 500 for i in range(length)]


def address(array: mx.array) -> int:
    mx.eval(array)
    pointer: int = np.asarray(memoryview(array)).__array_interface__["data"][0]
    return pointer


def buffers(path: Path, length: int) -> dict[Kind, list[dict[tuple[int, int], int]]]:
    """Of each layer, by the kind of its cache: the buffers that held its keys during one prefill, with their bytes."""
    driver = Driver(path, prefix_cache=False, max_prefill_chunk=CHUNK, max_stall_ms=60_000)
    seq_id = driver.add(prompt(length), 2)
    found: dict[Kind, list[dict[tuple[int, int], int]]] = {}
    while driver.seqs[seq_id].num_computed_tokens < length - 1:
        driver.step()
        numbers = dict.fromkeys(Kind, 0)
        for leaf in leaves(driver.engine.runner._prefilled[seq_id]):
            if kind(leaf) is Kind.RECURRENT:
                continue
            layers, number = found.setdefault(kind(leaf), []), numbers[kind(leaf)]
            numbers[kind(leaf)] += 1
            if number == len(layers):
                layers.append({})
            layers[number][address(leaf.keys), leaf.keys.shape[2]] = leaf.keys.shape[2]
    driver.run()
    return found


@pytest.mark.parametrize("name", cases(["qwen3", "qwen3_5", "vision:qwen3_5"], ["vision:qwen3_5"]))
def test_a_prefill_allocates_what_the_prompt_takes_once(checkpoint: Callable[..., Path], name: str) -> None:
    for length in (300, 600, 1200):
        for layer in buffers(checkpoint(name), length)[Kind.ATTENTION]:
            assert list(layer.values()) == [allocated_slots(length)]


def test_a_sliding_window_is_not_allocated_at_the_length_of_the_prompt(checkpoint: Callable[..., Path]) -> None:
    found = buffers(checkpoint("gemma3_text"), 1200)
    assert len(found) == 2
    for layer in found[Kind.WINDOW]:
        assert max(layer.values()) <= WINDOW_SLACK


def test_a_reply_goes_on_growing_in_steps(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"), prefix_cache=False)
    driver.add(prompt(1020), 40)
    widths = set()
    while driver.engine.has_work:
        driver.step()
        groups = (group for batch in driver.engine.runner.batches for group in batch.groups)
        widths |= {leaf.keys.shape[2] for group in groups for leaf in leaves(group.kv)}
    assert widths == {1024, 1280}
