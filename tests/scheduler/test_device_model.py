"""The device model agrees with what others measured on real chips, and behaves as its formula says."""

from dataclasses import replace

import pytest

from tests.support.device_catalogue import CHIPS, EIGHT, FOUR, HALF, SHAPES
from tests.support.device_model import Device

TOLERANCE = 0.25

_PAGE = "mlx-lm's own page of benchmarks"
_SCORECARD = "scorecard of Rapid-MLX, a server on MLX, long replies"
_BESIDE = "mlx-lm as measured by mlxcel, a Rust engine on MLX, to compare itself with"
_RUST = "mlxcel itself, which reports 99 % of mlx-lm's speed in the median"
_LLAMA = "llama.cpp's collection for Apple chips, Llama 2 7B in Q4_0"

DECODE = [  # chip, model, bits, tokens before the reply, tokens a second, source
    ("M4 Max", "Qwen3 4B", FOUR, 2048, 134.5, _PAGE),
    ("M4 Max", "Qwen3 4B", EIGHT, 2048, 86.9, _PAGE),
    ("M4 Max", "Qwen3 4B", HALF, 2048, 52.5, _PAGE),
    ("M4 Max", "Qwen3 30B-A3B", FOUR, 2048, 113.3, _PAGE),
    ("M4 Max", "Qwen3 30B-A3B", EIGHT, 2048, 83.2, _PAGE),
    ("M3 Pro", "Qwen3 4B", FOUR, 2048, 44.6, "a pull request for that page"),
    ("M4 Pro", "Qwen3 0.6B", EIGHT, 128, 284.2, "a user's run of the former vllm-mlx"),
    ("M3 Max", "Llama 3.3 70B", FOUR, 500, 9.35, "a user's comparison of mlx-lm with llama.cpp, in an issue"),
    ("M2 Max", "Qwen3.6 35B-A3B", FOUR, 100, 79.8, "a user's run of Rapid-MLX"),
    ("M3 Ultra", "Qwen3 8B", FOUR, 100, 112.9, "a run of Rapid-MLX by its author"),
    ("M3 Ultra", "Qwen3 0.6B", FOUR, 500, 364.7, _SCORECARD),
    ("M3 Ultra", "Llama 3.1 8B", FOUR, 500, 122.9, _SCORECARD),
    ("M3 Ultra", "Mistral Small 24B", FOUR, 500, 47.2, _SCORECARD),
    ("M3 Ultra", "Qwen3.8 27B", FOUR, 500, 37.7, _SCORECARD + "; Qwen3.5, of the same shape"),
    ("M3 Ultra", "Qwen3.6 35B-A3B", FOUR, 500, 95.2, _SCORECARD),
    ("M3 Ultra", "Qwen3.6 35B-A3B", EIGHT, 500, 80.0, _SCORECARD),
    ("M3 Ultra", "Qwen3-Next 80B-A3B", FOUR, 500, 73.5, _SCORECARD),
    ("M3 Ultra", "GLM-4.5-Air 106B", FOUR, 500, 53.6, _SCORECARD),
    ("M3 Ultra", "gpt-oss 20B", EIGHT, 500, 124.2, _SCORECARD),
    ("M1 Ultra", "Qwen3 0.6B", FOUR, 50, 299.6, _BESIDE),
    ("M1 Ultra", "Qwen3 4B", FOUR, 50, 123.9, _BESIDE),
    ("M1 Ultra", "Qwen3 8B", FOUR, 50, 84.5, _BESIDE),
    ("M1 Ultra", "Llama 3.1 8B", FOUR, 50, 110.7, _BESIDE),
    ("M1 Ultra", "Llama 3.1 8B", HALF, 50, 35.3, _BESIDE),
    ("M1 Ultra", "Mistral Small 24B", FOUR, 50, 32.0, _BESIDE),
    ("M1 Ultra", "Qwen3.8 27B", FOUR, 50, 25.9, _BESIDE),
    ("M1 Ultra", "Qwen3 30B-A3B", FOUR, 50, 70.2, _BESIDE),
    ("M1 Ultra", "Qwen3.6 35B-A3B", FOUR, 50, 73.2, _BESIDE),
    ("M1 Ultra", "gpt-oss 120B", FOUR, 50, 57.6, _BESIDE),
    ("M5 Max", "gpt-oss 120B", FOUR, 50, 110.4, _BESIDE),
    ("M5 Max", "Qwen3 0.6B", FOUR, 50, 571.8, _RUST),
    ("M5 Max", "Qwen3 4B", FOUR, 50, 190.3, _RUST),
    ("M5 Max", "Qwen3 8B", FOUR, 50, 112.3, _RUST),
    ("M5 Max", "Llama 3.1 8B", HALF, 50, 33.1, _RUST),
    ("M5 Max", "Mistral Small 24B", FOUR, 50, 39.6, _RUST),
    ("M5 Max", "Qwen3 32B", FOUR, 50, 27.6, _RUST + "; Qwen3-VL, of the same shape"),
    ("M5 Max", "Qwen3.8 27B", FOUR, 50, 32.8, _RUST),
    ("M5 Max", "Qwen3 30B-A3B", FOUR, 50, 177.7, _RUST),
    ("M5 Max", "Qwen3.6 35B-A3B", FOUR, 50, 151.6, _RUST),
    ("M5 Max", "Qwen3-Next 80B-A3B", FOUR, 50, 118.6, _RUST),
    ("M5 Max", "Qwen3.8 27B", EIGHT, 1040, 17.2, "a user's benchmark of local models with mlx-lm"),
    ("M1", "Llama 2 7B", FOUR, 64, 14.2, _LLAMA),
    ("M1 Pro", "Llama 2 7B", FOUR, 64, 36.4, _LLAMA),
    ("M2", "Llama 2 7B", FOUR, 64, 21.9, _LLAMA),
    ("M2 Pro", "Llama 2 7B", FOUR, 64, 37.9, _LLAMA),
    ("M3", "Llama 2 7B", FOUR, 64, 21.3, _LLAMA),
    ("M3 Pro", "Llama 2 7B", FOUR, 64, 30.7, _LLAMA),
    ("M4", "Llama 2 7B", FOUR, 64, 24.1, _LLAMA),
    ("M4 Pro", "Llama 2 7B", FOUR, 64, 50.7, _LLAMA),
]

PREFILL = [  # chip, model, bits, tokens of the prompt, tokens a second, source
    ("M4 Max", "Qwen3 0.6B", FOUR, 2048, 10279, "a pull request of mlx-lm"),
    ("M4 Max", "Qwen3 4B", FOUR, 2048, 1622, _PAGE),
    ("M4 Max", "Qwen3 4B", HALF, 2048, 1781, _PAGE),
    ("M4 Max", "Qwen3 30B-A3B", FOUR, 2048, 1754, _PAGE),
    ("M4 Max", "gpt-oss 20B", EIGHT, 2048, 1589, "a pull request of mlx-lm"),
    ("M3 Pro", "Qwen3 4B", FOUR, 2048, 615, "a pull request for mlx-lm's page of benchmarks"),
    ("M3 Max", "Llama 3.3 70B", FOUR, 1171, 83.8, "a user's comparison of mlx-lm with llama.cpp, in an issue"),
    ("M5 Max", "Qwen3.8 27B", FOUR, 2048, 765, "a user's record of measurements with mlx-vlm's server"),
    ("M5 Max", "Qwen3.8 27B", EIGHT, 4113, 670, "a user's benchmark of local models with mlx-lm"),
    ("M1", "Llama 2 7B", FOUR, 512, 118, _LLAMA),
    ("M1 Ultra", "Llama 2 7B", FOUR, 512, 1030, _LLAMA),
    ("M2", "Llama 2 7B", FOUR, 512, 180, _LLAMA),
    ("M2 Ultra", "Llama 2 7B", FOUR, 512, 1238, _LLAMA),
    ("M3 Ultra", "Llama 2 7B", FOUR, 512, 1471, _LLAMA),
    ("M4", "Llama 2 7B", FOUR, 512, 221, _LLAMA),
    ("M4 Pro", "Llama 2 7B", FOUR, 512, 440, _LLAMA),
]

WIDTH = [  # chip, model, rows, cost of their step over that of one row, source
    ("M5 Max", "Llama 3.3 70B", 3, 1.11, "a pull request of MLX"),
    ("M5 Max", "Llama 3.3 70B", 5, 1.42, "a pull request of MLX"),
    ("M5 Max", "Llama 3.3 70B", 8, 2.20, "a pull request of MLX"),
    ("M5 Max", "Llama 3.3 70B", 12, 3.16, "a pull request of MLX"),
    ("M4 Pro", "Qwen3 14B", 2, 1.0, "an issue of MLX"),
    ("M4 Pro", "Qwen3 14B", 4, 1.43, "an issue of MLX"),
    ("M4 Pro", "Qwen3 14B", 8, 2.84, "an issue of MLX"),
    ("M2", "Qwen3 8B", 2, 1.73, "an issue of MLX"),
]


def device(chip: str, shape: str, bits: float = FOUR) -> Device:
    return Device(CHIPS[chip], replace(SHAPES[shape], bits=bits))


@pytest.mark.parametrize("figure", DECODE, ids=str)
def test_published_speeds_of_decoding_are_reproduced(figure: tuple[str, str, float, int, float, str]) -> None:
    chip, shape, bits, num_tokens, published, _ = figure
    assert 1 / device(chip, shape, bits).decode_s([[[num_tokens]]]) == pytest.approx(published, rel=TOLERANCE)


@pytest.mark.parametrize("figure", PREFILL, ids=str)
def test_published_speeds_of_prefill_are_reproduced(figure: tuple[str, str, float, int, float, str]) -> None:
    chip, shape, bits, num_tokens, published, _ = figure
    assert num_tokens / device(chip, shape, bits).chunk_s(num_tokens) == pytest.approx(published, rel=TOLERANCE)


@pytest.mark.parametrize("figure", WIDTH, ids=str)
def test_published_costs_of_several_rows_are_reproduced(figure: tuple[str, str, int, float, str]) -> None:
    chip, shape, num_rows, published, _ = figure
    one_s, all_s = (device(chip, shape).decode_s([[[100] * n]]) for n in (1, num_rows))
    assert all_s / one_s == pytest.approx(published, rel=TOLERANCE)
