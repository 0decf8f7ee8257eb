"""What does not change while a model is served: versions, and facts of the checkpoint. Reads no clock."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from ... import __version__
from ...core.config import EngineConfig
from ...prompt.processor import RequestProcessor
from ..assembly import EngineFacts

_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "llguidance")


def build_fields() -> dict[str, str]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": "metal" if mx.metal.is_available() else "cpu",
        **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
    }


def model_fields(config: EngineConfig, facts: EngineFacts, processor: RequestProcessor) -> dict[str, Any]:
    """Rates are those measured at load, in tokens per second."""
    info, rule = facts.info, facts.resume_rule
    return {
        "model": info.model,
        "architecture": info.architecture,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weights_bytes": info.weights_bytes,
        "takes_images": info.takes_images,
        "takes_videos": processor.no_videos is None,
        "no_videos": processor.no_videos,
        "bytes_per_token": facts.footprint.bytes_per_token,
        "fixed_bytes_per_row": facts.footprint.fixed_bytes,
        "sliding_windows": [window for window, _ in facts.footprint.windows],
        "resumes_anywhere": rule is not None and not rule.needs_state and rule.window is None,
        "keeps_recurrent_state": rule is not None and rule.needs_state,
        "prefix_cache": config.prefix_cache and rule is not None,
        "reasoning_parser": processor.reasoning,
        "tool_call_parser": processor.tools,
        "prefill_tokens_per_s_at_load": round(facts.calibration.tokens_per_s, 1),
        "max_num_seqs": config.max_num_seqs,
        "max_stall_ms": config.max_stall_ms,
        "created": info.created,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
