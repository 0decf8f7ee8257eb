"""The compiled parts of the sampler: the same tokens, few operations, and one compilation for all rows."""

import io
import os
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from vllm_mlx.runner import sampler
from vllm_mlx.runner.sampler import Sampler, random_bits

from .test_sampler import VOCAB, sequence

SHAPES = [(1, VOCAB), (8, VOCAB), (3, 1001), (1, 1001), (5, 7)]
# Settings of the rows → the most operations of a step's sampling that compute something.
OPERATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0}, 1),
    "drawn": ({"temperature": 0.6}, 5),
    "min_p": ({"temperature": 0.6, "min_p": 0.1}, 5),
    "top_p and top_k": ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, 12),
    "penalised": ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, 15),
}
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}


@pytest.fixture(autouse=True, scope="module")
def compilation() -> Iterator[None]:
    """Compile here, even where all other tests run what is not compiled."""
    mx.enable_compile()
    yield
    if "MLX_DISABLE_COMPILE" in os.environ:
        mx.disable_compile()


def column(rows: int, *values: float) -> mx.array:
    return mx.array([values[row % len(values)] for row in range(rows)])[:, None]


def keys(rows: int, first: int = 0) -> mx.array:
    return mx.array([[first + row, 77] for row in range(rows)], dtype=mx.uint32)


def inputs(name: str, rows: int, vocab: int, dtype: mx.Dtype = mx.float32, first_key: int = 0) -> list[mx.array]:
    """Arguments of a compiled function."""
    logits = (3 * mx.random.normal((rows, vocab), key=mx.random.key(rows))).astype(dtype)
    if name == "penalise":
        counts = mx.random.randint(0, 3, (rows, vocab), key=mx.random.key(1)).astype(mx.float32)
        settings = [column(rows, 0.5, 0.0), column(rows, 0.0, 0.3), column(rows, 1.2, 1.0)]
        return [logits, counts, mx.minimum(counts, 1.0), *settings]
    given = [logits, column(rows, 0.5, 1.0), random_bits(keys(rows, first_key), vocab), column(rows, -3.0, -mx.inf)]
    if name == "draw":
        return given
    return [*given, column(rows, 0.9, 1.0), column(rows, 5, vocab), mx.arange(vocab)[None]]


@pytest.mark.parametrize(
    "dtype", [pytest.param(mx.float32, id="float32"), pytest.param(mx.bfloat16, id="bfloat16", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", ["draw", "draw_sorted", "penalise"])
def test_compiled_or_not_the_result_is_the_same(name: str, dtype: mx.Dtype) -> None:
    for rows, vocab in SHAPES:
        for first_key in range(5):
            given = inputs(name, rows, vocab, dtype, first_key)
            compiled, plain = getattr(sampler, name)(*given), getattr(sampler, f"_{name}")(*given)
            assert mx.allclose(compiled, plain, rtol=0, atol=0 if name.startswith("draw") else 1e-6)


@pytest.mark.parametrize("name", ["draw", "draw_sorted", "penalise"])
def test_rows_and_vocabularies_of_any_number_compile_once(name: str) -> None:
    traces = 0

    def counted(*given: mx.array) -> mx.array:
        nonlocal traces
        traces += 1
        result: mx.array = getattr(sampler, f"_{name}")(*given)
        return result

    compiled = mx.compile(counted, shapeless=True)
    for rows, vocab in SHAPES:
        assert compiled(*inputs(name, rows, vocab)).shape == getattr(sampler, name)(*inputs(name, rows, vocab)).shape
    assert traces == 1


@pytest.mark.parametrize("vocab", [VOCAB, 1001])
def test_the_noise_is_that_of_mlx(vocab: int) -> None:
    """Where all logits are equal, the noise alone decides."""
    flat, ones, none = mx.zeros((6, vocab)), column(6, 1.0), column(6, -mx.inf)
    for first in range(0, 60, 6):
        drawn = sampler.draw(flat, ones, random_bits(keys(6, first), vocab), none)
        noise = [mx.random.gumbel((vocab,), key=key) for key in keys(6, first)]
        assert drawn.tolist() == mx.argmax(mx.stack(noise), axis=-1).tolist()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_samples_in_few_operations(name: str, rows: int) -> None:
    settings, most = OPERATIONS[name]
    seqs = [sequence(output=[4], seed=row, **settings) for row in range(rows)]
    logits, fed = mx.zeros((rows, VOCAB)), mx.full(rows, 4)
    of_batch = Sampler(seqs, VOCAB)
    mx.eval(logits, fed, of_batch.sample(logits, fed).tokens)
    assert len(computing(of_batch.sample(logits, fed).tokens)) <= most


def computing(sampled: mx.array) -> list[str]:
    """The operations behind an array that compute something, by name."""
    graph = io.StringIO()
    mx.export_to_dot(graph, sampled)
    names = re.findall(r'label ="([^"]+)", shape=rectangle', graph.getvalue())
    return [name for name in names if name not in VIEWS]


def test_settings_are_no_part_of_what_is_compiled() -> None:
    """The first rows' values would stay for all others."""
    cold, hot = (column(1, value) for value in (1e-3, 50.0))
    logits, bits, none = mx.arange(VOCAB, dtype=mx.float32)[None], random_bits(keys(1), VOCAB), column(1, -mx.inf)
    assert sampler.draw(logits, cold, bits, none).item() == VOCAB - 1
    drawn = {sampler.draw(logits, hot, random_bits(keys(1, at), VOCAB), none).item() for at in range(20)}
    assert len(drawn) > 5
