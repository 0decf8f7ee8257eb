"""Operations that a decode step gives to MLX, per layer and beside the layers, against a bare loop of the same rows.

Counts depend on the device: where it has no kernel for a function, MLX computes it by several operations. Ratios hold
everywhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.engine_driver import Driver, plain_loop
from tests.support.failing_device import num_pending
from tests.support.rows import cases
from vllm_mlx.cache.layers import arrays

# Architecture → config of one period of its layers, which a deeper model repeats.
PERIODS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen3_5": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 3},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
# Attention runs group by group. Where MLX has kernels, it is a larger part of a layer's operations.
_TWO_GROUPS = 1.6 if mx.metal.is_available() else 1.15
# Lengths of rows → the most operations of a layer, as a multiple of the bare loop's; the most submissions of a step.
BOUNDS: dict[tuple[int, ...], tuple[float, int]] = {
    (20,): (1.0, 2),  # the step, and the probe for failed command buffers
    (20, 20): (1.0, 2),
    (20, 700): (_TWO_GROUPS, 2),  # one forward pass for both
}
_ALL = 40  # tokens of a reply that are predicted
_REST = 4  # most operations beside the layers that the bare loop has not


def deeper(config: dict[str, Any]) -> dict[str, Any]:
    return {name: 2 * value for name, value in config.items()}


def of_engine(path: Path, lengths: tuple[int, ...], num_predicted: int | None = None) -> list[int]:
    """The operations of each submission of one decode step.

    `num_predicted`: tokens at the start of each reply that come as drafts. Rows that had some are groups of their own.
    """
    driver = Driver(path, num_draft_tokens=0 if num_predicted is None else 7)
    for row, length in enumerate(lengths):
        prompt = [(row + place) % 500 for place in range(length)]
        reply = plain_loop(path, prompt, _ALL)[0] if num_predicted else ()
        driver.add(prompt, max_tokens=100, prediction=tuple(reply[:num_predicted]))
    while min(seq.num_output_tokens for seq in driver.seqs.values()) < (5 if num_predicted is None else 20):
        driver.step()
    wanted = len(lengths) * (8 if num_predicted == _ALL else 1)
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("async_eval", "eval"):
            patch.setattr(mx, name, counted(getattr(mx, name), counts))
        for _ in range(20):
            before = num_output(driver)
            driver.step()
            if num_output(driver) - before == wanted:
                return counts
            counts.clear()
    raise AssertionError("no step computes so many tokens")


def num_output(driver: Driver) -> int:
    return sum(seq.num_output_tokens for seq in driver.seqs.values())


@pytest.mark.parametrize(
    ("name", "num_rows", "most"),
    [
        ("qwen3", 4, 1.4),
        pytest.param("qwen3", 1, 1.1, marks=pytest.mark.full),
        pytest.param("gemma3_text", 1, 1.1, marks=pytest.mark.full),
        pytest.param("gemma3_text", 4, 1.4, marks=pytest.mark.full),
    ],
)
def test_a_pass_with_drafts_gives_mlx_little_more(
    checkpoint: Callable[..., Path], name: str, num_rows: int, most: float
) -> None:
    period = PERIODS[name]
    paths = [checkpoint(name, **config) for config in (period, deeper(period))]
    lengths = tuple(20 + row for row in range(num_rows))
    plain, with_drafts = ([sum(of_engine(path, lengths, num)) for path in paths] for num in (8, _ALL))
    assert with_drafts[1] - with_drafts[0] <= most * (plain[1] - plain[0])


def counted(submits: Callable[..., None], counts: list[int]) -> Callable[..., None]:
    def submit(*work: Any) -> None:
        counts.append(num_pending(arrays(list(work))))
        submits(*work)

    return submit


def of_bare_loop(path: Path, num_rows: int) -> int:
    model = load_model(path)[0]
    rows = []
    for row in range(num_rows):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([[row] * 20]), cache=caches))
        rows.append(caches)
    caches = rows[0] if num_rows == 1 else [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]
    tokens = mx.zeros(num_rows, dtype=mx.int32)
    for _ in range(5):
        mx.eval(tokens)
        tokens = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
    return num_pending([tokens])


@pytest.mark.parametrize("lengths", BOUNDS, ids=lambda lengths: "+".join(map(str, lengths)))
@pytest.mark.parametrize("name", cases(PERIODS, ["qwen3", "qwen3_5"]))
def test_a_step_gives_mlx_no_more_than_it_must(
    checkpoint: Callable[..., Path], name: str, lengths: tuple[int, ...]
) -> None:
    period = PERIODS[name]
    paths = [checkpoint(name, **config) for config in (period, deeper(period))]
    counts = [of_engine(path, lengths) for path in paths]
    (ours, ours_deep), (bare, bare_deep) = map(sum, counts), (of_bare_loop(path, len(lengths)) for path in paths)
    most, num_submissions = BOUNDS[lengths]
    assert ours_deep - ours <= most * (bare_deep - bare)
    assert 2 * ours - ours_deep <= most * (2 * bare - bare_deep + _REST), "beside the layers"
    assert len(counts[0]) == len(counts[1]) <= num_submissions
