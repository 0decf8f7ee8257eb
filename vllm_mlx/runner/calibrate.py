"""Short measured runs after load: the speed at which this machine prefills, and the memory that a chunk takes."""

import time
from dataclasses import dataclass

import mlx.core as mx

from ..cache import layers
from ..core.sequence import PromptInputs
from .attention import AttentionShape, observed
from .device import peak_of
from .model import Model, MultimodalModel
from .vision_inputs import encode

_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    tokens_per_s: float
    overhead_s: float  # seconds of a forward pass of one token
    chunk_bytes_per_token: float  # activations at their peak
    attention: frozenset[AttentionShape] = frozenset()


def calibrate(model: Model) -> Calibration:
    """Measure a few forward passes. The first one also compiles kernels and is not counted."""
    with observed() as attention:
        _run(model, _PROBE_TOKENS)
    mx.clear_cache()
    probe_s, peak = peak_of(lambda: _run(model, _PROBE_TOKENS))
    token_s = min(_run(model, 1) for _ in range(2))
    mx.clear_cache()
    return Calibration(
        tokens_per_s=_PROBE_TOKENS / max(1e-6, probe_s - token_s),
        overhead_s=token_s,
        chunk_bytes_per_token=peak / _PROBE_TOKENS,
        attention=frozenset(attention),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    feature_bytes_per_token: int
    encoder_bytes: int  # activations at their peak, for the largest image


def calibrate_images(model: MultimodalModel, sizes: tuple[PromptInputs, PromptInputs], max_tokens: int) -> ImageCost:
    """Run the vision encoder on a small and a larger image, and extrapolate its activations by tokens from there."""
    (small, low), (large, high) = ((prompt.media[0].length, _encode(model, prompt)) for prompt in sizes)
    per_token = max(0.0, (high.peak_bytes - low.peak_bytes) / (large - small)) if large > small else 0.0
    return ImageCost(
        feature_bytes_per_token=-(-low.feature_bytes // small),
        encoder_bytes=int(max(low.peak_bytes, high.peak_bytes) + per_token * max(0, max_tokens - large)),
    )


@dataclass(frozen=True, slots=True)
class _Encoded:
    feature_bytes: int
    peak_bytes: int


def _encode(model: MultimodalModel, prompt: PromptInputs) -> _Encoded:
    mx.clear_cache()
    features, peak = peak_of(lambda: encode(model.module, list(prompt.token_ids), prompt.media[0]))
    encoded = _Encoded(features.nbytes, peak)
    mx.clear_cache()
    return encoded


def _run(model: Model, num_tokens: int) -> float:
    start = time.perf_counter()
    caches = model.new_caches()
    model.forward(mx.array([[0] * num_tokens]), caches)
    mx.eval(layers.state_arrays(caches))
    return time.perf_counter() - start
