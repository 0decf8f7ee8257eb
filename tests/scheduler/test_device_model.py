"""The device model agrees with what others measured on real chips, and behaves as its formula says."""

from dataclasses import dataclass, replace

import pytest

from tests.support.device_catalogue import CHIPS, EIGHT, FOUR, HALF, SHAPES
from tests.support.device_model import Device

TOLERANCE = 0.25


@dataclass(frozen=True)
class Published:
    """Tokens a second that somebody measured, after or for a prompt of `num_tokens`."""

    chip: str
    shape: str
    bits: float
    num_tokens: int
    decode: float | None
    prefill: float | None
    source: str


_MLX_LM = "mlx-lm's own page of benchmarks, 64 GB"
_SCORECARD = "scorecard of an MLX server's project, 256 GB, long replies"

PUBLISHED = (
    Published("M4 Max", "Qwen3 4B", FOUR, 2048, 134.5, 1622, _MLX_LM),
    Published("M4 Max", "Qwen3 4B", EIGHT, 2048, 86.9, 1607, _MLX_LM),
    Published("M4 Max", "Qwen3 4B", HALF, 2048, 52.5, 1781, _MLX_LM),
    Published("M4 Max", "Qwen3 30B-A3B", FOUR, 2048, 113.3, 1754, _MLX_LM),
    Published("M4 Max", "Qwen3 30B-A3B", EIGHT, 2048, 83.2, 1719, _MLX_LM),
    Published("M3 Ultra", "Qwen3 0.6B", FOUR, 500, 364.7, None, _SCORECARD),
    Published("M3 Ultra", "Llama 3.1 8B", FOUR, 500, 122.9, None, _SCORECARD),
    Published("M3 Ultra", "Mistral Small 24B", FOUR, 500, 47.2, None, _SCORECARD),
)


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda figure: f"{figure.chip} {figure.shape} {figure.bits}")
def test_published_figures_are_reproduced(figure: Published) -> None:
    device = Device(CHIPS[figure.chip], replace(SHAPES[figure.shape], bits=figure.bits))
    if figure.decode is not None:
        assert 1 / device.decode_s([[[figure.num_tokens]]]) == pytest.approx(figure.decode, rel=TOLERANCE)
    if figure.prefill is not None:
        assert figure.num_tokens / device.chunk_s(figure.num_tokens) == pytest.approx(figure.prefill, rel=TOLERANCE)
