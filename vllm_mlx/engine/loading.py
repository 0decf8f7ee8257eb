"""Builds the parts of an engine: a measured model, sizes that fit this machine, scheduler and cache. Knows no step."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from ..cache.tree import PrefixTree
from ..core.config import EngineConfig, ModelInfo
from ..core.errors import ConfigError, setting
from ..core.memory import MemoryBudget, RowFootprint
from ..media.vision import VisionProbe
from ..runner.calibrate import Calibration, ImageCost, calibrate, calibrate_images
from ..runner.checkpoint import Checkpoint
from ..runner.device import apply_limits, device_memory
from ..runner.family_check import check_family, media_fault
from ..runner.model import Model, MultimodalModel, load_model, weights_bytes
from ..scheduler.mllm import MLLMScheduler
from ..scheduler.prefill_pacer import PrefillPacer
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.scheduler import Scheduler
from .monitoring.facts import EngineFacts

logger = logging.getLogger(__name__)

_DEFAULT_MODEL_LEN = 32768  # where the checkpoint names no limit
_MEDIA_SHARE = 8  # one part in so many of what rows may take is at most kept of encoded images
_IMAGES_SHARE = 64  # 1/64 of all memory for encoder inputs of recent images, and as much for their pixels
_MAX_IMAGES_BYTES = 512 << 20
_RENDERED_SHARE = 256  # 1/256 of all memory for texts and ids of recent images: some 70 kB for a full-HD one
_MAX_RENDERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """In memory, and what running it takes here."""

    model: Model
    calibration: Calibration
    images: ImageCost | None = None  # None: it takes none
    video_fault: str | None = None  # why what the processor makes of a video cannot be served


def load_measured(config: EngineConfig, checkpoint: Checkpoint, probe: VisionProbe | None = None) -> MeasuredModel:
    """Raises ConfigError. A model that takes images is tried with `probe`; without one, it takes none."""
    total = _total_bytes(config)
    if checkpoint.file_bytes > total:
        raise ConfigError(
            f"Too little memory: the weights of {config.model} take {checkpoint.file_bytes / 1e9:.1f} GB, "
            f"the budget is {total / 1e9:.1f} GB. Use a smaller or more strongly quantised model, or raise "
            f"{setting('memory_budget')}."
        )
    apply_limits(total)
    model = load_model(checkpoint, trust_remote_code=config.trust_remote_code, text_only=config.text_only)
    calibration = calibrate(model)
    if probe is None or not isinstance(model, MultimodalModel):
        return MeasuredModel(model=model, calibration=calibration)
    check_family(model, probe.images.prompt, probe.images.inputs)
    video_fault = None if probe.video is None else media_fault(model, probe.video.prompt, probe.video.inputs)
    images = calibrate_images(model, probe.sizes, probe.max_image_tokens)
    return MeasuredModel(model=model, calibration=calibration, images=images, video_fault=video_fault)


def engine_facts(config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel) -> EngineFacts:
    """Raises ConfigError where the context that was asked for does not fit."""
    model = measured.model
    memory = _memory(config, measured)
    info = ModelInfo(
        model=config.model,
        architecture=checkpoint.architecture,
        max_model_len=_model_len(config, checkpoint, memory, model.footprint),
        weights_bytes=memory.weights_bytes,
        vocab_size=model.vocab_size,
        takes_images=measured.images is not None,
        created=int(time.time()),
    )
    return EngineFacts(
        info=info,
        memory=memory,
        footprint=model.footprint,
        calibration=measured.calibration,
        resume_rule=model.resume_rule,
        video_fault=measured.video_fault,
    )


def make_pacer(config: EngineConfig, calibration: Calibration) -> PrefillPacer:
    return PrefillPacer(
        max_stall_s=config.max_stall_ms / 1000,
        max_chunk=config.max_prefill_chunk,
        tokens_per_s=calibration.tokens_per_s,
        overhead_s=calibration.overhead_s,
    )


def make_scheduler(
    config: EngineConfig,
    model: Model,
    memory: MemoryBudget,
    pacer: PrefillPacer,
    cache: PrefixPlanner | None,
    images: ImageCost | None = None,
) -> Scheduler:
    parts: dict[str, Any] = {
        "memory": memory,
        "footprint": model.footprint,
        "pacer": pacer,
        "can_batch": model.can_batch,
        "prefix_cache": cache,
    }
    if not isinstance(model, MultimodalModel):
        return Scheduler(config, **parts)
    return MLLMScheduler(
        config,
        **parts,
        media=model.media,
        max_media_bytes=memory.rows_bytes // _MEDIA_SHARE,
        media_bytes_per_token=0 if images is None else images.feature_bytes_per_token,
        bidirectional_images=model.bidirectional_images,
    )


def make_prefix_cache(
    config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, memory: MemoryBudget
) -> PrefixPlanner | None:
    """None: it is off."""
    model = measured.model
    if not config.prefix_cache:
        return None
    if model.resume_rule is None:
        logger.warning("The prefix cache is off: %s keeps state that cannot be copied", checkpoint.architecture)
        return None
    max_bytes = min(memory.rows_bytes, config.cache_memory_bytes or memory.rows_bytes)
    return PrefixPlanner(
        PrefixTree(max_bytes=max_bytes, s_per_token=1 / measured.calibration.tokens_per_s),
        checkpoint.fingerprint(),
        model.resume_rule,
        model.footprint,
        max_bytes=max_bytes,
        snapshot_every=config.snapshot_every,
    )


def _total_bytes(config: EngineConfig) -> int:
    return config.memory_budget_bytes or device_memory().default_budget_bytes


def _memory(config: EngineConfig, measured: MeasuredModel) -> MemoryBudget:
    total, images = _total_bytes(config), measured.images
    chunk_bytes = int(measured.calibration.chunk_bytes_per_token * config.max_prefill_chunk)
    return MemoryBudget(
        total_bytes=total,
        weights_bytes=weights_bytes(measured.model.module),
        transient_bytes=max(chunk_bytes, 0 if images is None else images.encoder_bytes),
        encoder_inputs_bytes=0 if images is None else min(_MAX_IMAGES_BYTES, total // _IMAGES_SHARE),
        decoded_bytes=0 if images is None else min(config.media.media_cache_bytes, total // _IMAGES_SHARE),
        rendered_bytes=0 if images is None else min(_MAX_RENDERED_BYTES, total // _RENDERED_SHARE),
    )


def _model_len(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryBudget, footprint: RowFootprint) -> int:
    """The context window: the flag's or the checkpoint's, as far as memory holds one row of that length."""
    declared = checkpoint.max_model_len or _DEFAULT_MODEL_LEN
    wanted = config.max_model_len or declared
    if wanted > declared and checkpoint.max_model_len is not None:
        raise ConfigError(f"{setting('max_model_len')} {wanted} exceeds the checkpoint's context of {declared} tokens.")
    fitting = footprint.max_tokens(memory.rows_bytes)
    if fitting >= wanted:
        return wanted
    if config.max_model_len is not None or fitting < 2:
        raise ConfigError(
            f"Too little memory for {setting('max_model_len')} {wanted}: {fitting} tokens of context fit beside the "
            f"weights. Lower it, use a smaller model, or raise {setting('memory_budget')}."
        )
    logger.warning("Context limited to %d of %d tokens by the memory budget", fitting, declared)
    return fitting
