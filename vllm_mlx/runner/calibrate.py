"""Short measured runs after load: how fast this machine prefills this model, and what a chunk takes beside the rows."""

import time
from dataclasses import dataclass

import mlx.core as mx

from ..cache import layers
from .model import Model

_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    tokens_per_s: float
    overhead_s: float  # of a forward pass of one token
    chunk_bytes_per_token: float  # activations at their peak


def calibrate(model: Model) -> Calibration:
    """Three forward passes; the first also compiles kernels."""
    _run(model, _PROBE_TOKENS)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    probe_s = _run(model, _PROBE_TOKENS)
    peak = mx.get_peak_memory() - before
    token_s = min(_run(model, 1) for _ in range(2))
    mx.clear_cache()
    return Calibration(
        tokens_per_s=_PROBE_TOKENS / max(1e-6, probe_s - token_s),
        overhead_s=token_s,
        chunk_bytes_per_token=max(0, peak) / _PROBE_TOKENS,
    )


def _run(model: Model, num_tokens: int) -> float:
    start = time.perf_counter()
    caches = model.new_caches()
    model.forward(mx.array([[0] * num_tokens]), caches)
    mx.eval(layers.state_arrays(caches))
    return time.perf_counter() - start
