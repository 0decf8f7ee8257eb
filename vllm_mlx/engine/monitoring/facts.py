"""Facts that do not change while a model is served: versions of the libraries, and properties of the checkpoint."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from ... import __version__
from ...cache.node import ResumeRule
from ...core.config import EngineConfig, ModelInfo
from ...core.memory import MemoryBudget, RowFootprint
from ...prompt.processor import RequestProcessor
from ...runner.calibrate import Calibration
from .schema import BuildFacts, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What loading has found out about the checkpoint on this machine."""

    info: ModelInfo
    memory: MemoryBudget
    footprint: RowFootprint
    calibration: Calibration
    resume_rule: ResumeRule | None = None  # None: state cannot be copied
    video_fault: str | None = None  # why videos are refused; None: they are served


def build_facts() -> BuildFacts:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": "metal" if mx.metal.is_available() else "cpu",
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "mlx_vlm": _version("mlx-vlm"),
        "transformers": _version("transformers"),
        "llguidance": _version("llguidance"),
    }


def model_facts(config: EngineConfig, facts: EngineFacts, processor: RequestProcessor) -> ModelFacts:
    """The prefill rate was measured at load, in tokens per second."""
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
