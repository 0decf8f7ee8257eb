"""Loads a model, measures its costs on this machine, and computes the sizes that fit. It builds no engine."""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import mlx.core as mx

from ..cache import layers
from ..core.config import DEFAULT_MAX_PIXELS, EngineConfig, ModelInfo
from ..core.encoding import Task
from ..core.errors import ConfigError, setting
from ..core.memory import AttentionCost, Budget, MemoryBudget, RowFootprint, readable
from ..core.request import checkpoint_defaults, usual_sampling
from ..core.stage import UNSEEN, LoadStage
from ..formats.tokenizer import read_json
from ..guidance.grammar_compiler import MAX_BYTES
from ..media.vision import VisionProbe
from ..ranks.lockstep import Ranks
from ..ranks.shards import several_macs
from ..runner.attention import assumed, can_force, score_bytes
from ..runner.calibrate import Calibration, ImageCost, calibrate, calibrate_images
from ..runner.checkpoint import Checkpoint
from ..runner.device import apply_limits, device_memory, wire_weights
from ..runner.family_check import check_family, media_fault
from ..runner.kernel_proof import check_kernels
from ..runner.load_model import advising, begin_loading
from ..runner.loading import SLICE_BYTES, Loading
from ..runner.model import Model, MultimodalModel, weight_arrays, weights_bytes
from ..runner.model_types import longest_chunk, text_config
from ..runner.mtp import HeadLoader
from ..runner.proofs import Proofs, prove_rows
from ..scheduler.prefill_pacer import PrefillPacer
from .macos import wired_bytes
from .monitoring.schema import EngineFacts

logger = logging.getLogger(__name__)

_DEFAULT_MODEL_LEN = 32768  # where the checkpoint names no limit
_MOST_SLICES = 50  # of the weights at the start, after each of which it can tell how far it is
_MAX_IMAGES_BYTES = 512 << 20
_MAX_RENDERED_BYTES = 64 << 20
_ASSUMED_TOKENS_PER_S = 1000.0  # of the prefill of a model that was never loaded
_MUCH_WIRED = 0.5  # share of the memory above which wired memory is worth a warning before load


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model in memory, and its costs on this machine."""

    model: Model
    calibration: Calibration
    images: ImageCost | None = None  # None for a model that takes no images
    video_fault: str | None = None  # why videos, as the processor prepares them, cannot be served
    load_s: float = 0.0
    is_assumed: bool = False  # whether the weights were not read, so that nothing was measured
    probe: VisionProbe | None = None  # with which the first load of a model that is not read measures images


def budget_of(config: EngineConfig, held_bytes: int = 0) -> Budget:
    """Return the memory that is set, or else the machine's default. `held_bytes`: weights of other models that stay."""
    return Budget(config.memory_budget_bytes or device_memory().default_budget_bytes, held_bytes)


def load_measured(
    config: EngineConfig,
    checkpoint: Checkpoint,
    probe: VisionProbe | None = None,
    budget: Budget | None = None,
    ranks: Ranks | None = None,
    stage: LoadStage = UNSEEN,
) -> MeasuredModel:
    """Raise ConfigError. A model that takes images is tested with `probe`. Without a probe it takes no images.

    With `ranks`, all of them call this at the same time: each loads and measures its shard, and `agreed` follows.
    """
    budget = budget or budget_of(config)
    _check_weights(config, checkpoint, budget, ranks)
    _log_wired_memory()
    apply_limits(budget.total_bytes)
    start_s = time.monotonic()
    stage.begin("reading weights", 0.0)
    slice_bytes = max(SLICE_BYTES, checkpoint.file_bytes // _MOST_SLICES)
    loading = begin_drafting(config, checkpoint, slice_bytes=slice_bytes, ranks=ranks)
    while (model := loading.advance()) is None:
        stage.share = loading.progress
        if ranks is not None:
            ranks.watch.advance()
    load_s, parts = time.monotonic() - start_s, measuring(config, checkpoint, model, probe, stage)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            measured: MeasuredModel = end.value
            return replace(measured, load_s=load_s)


def measuring(
    config: EngineConfig, checkpoint: Checkpoint, model: Model, probe: VisionProbe | None, stage: LoadStage
) -> Generator[None, None, MeasuredModel]:
    """Measure and prove in parts, between which other models may run steps. Raises ConfigError."""
    stage.begin("measuring a step")
    calibration = calibrate(model, has_experts=longest_chunk(checkpoint.config) is not None)
    yield
    check_kernels(calibration.attention)
    yield
    stage.begin("comparing cached with computed")
    prove_rows(model)
    yield
    if model.footprint.bytes_per_token and not calibration.attention:
        calibration = replace(calibration, attention=assumed(checkpoint.config))
    _wire(config, model)
    images, video_fault = None, None
    if probe is not None and isinstance(model, MultimodalModel):
        stage.begin("comparing images with mlx-vlm's")
        with advising(checkpoint, trust_remote_code=config.trust_remote_code):
            check_family(model, probe.images.prompt, probe.images.inputs)
        video_fault = None if probe.video is None else media_fault(model, probe.video.prompt, probe.video.inputs)
        yield
        images = calibrate_images(model, probe.sizes, probe.max_image_tokens, config.max_pixels)
    return MeasuredModel(model=model, calibration=calibration, images=images, video_fault=video_fault)


def unread(
    config: EngineConfig, checkpoint: Checkpoint, budget: Budget, probe: VisionProbe | None = None
) -> MeasuredModel:
    """Build a model without reading its weights, and assume the figures of a load. Raises ConfigError."""
    _check_weights(config, checkpoint, budget, None)
    model = begin_drafting(config, checkpoint, proofs=Proofs()).unread()
    calibration = assumed_calibration(checkpoint)
    if not model.footprint.bytes_per_token:
        calibration = replace(calibration, attention=frozenset())
    pixels = config.max_pixels or DEFAULT_MAX_PIXELS
    images = ImageCost(feature_bytes_per_token=0, encoder_bytes=0, max_pixels=pixels) if probe is not None else None
    return MeasuredModel(model=model, calibration=calibration, images=images, is_assumed=True, probe=probe)


def assumed_calibration(checkpoint: Checkpoint) -> Calibration:
    """Return the figures that are assumed until the first load of a checkpoint."""
    return Calibration(
        tokens_per_s=_ASSUMED_TOKENS_PER_S,
        overhead_s=0.0,
        chunk_bytes_per_token=_least_bytes_per_token(checkpoint),
        attention=assumed(checkpoint.config),
    )


def _check_weights(config: EngineConfig, checkpoint: Checkpoint, budget: Budget, ranks: Ranks | None) -> None:
    """Raise ConfigError if the weights alone do not fit, and say how many Macs could hold them."""
    try:
        budget.check_weights(config.model, checkpoint.file_bytes if ranks is None else ranks.shard.weights_bytes)
    except ConfigError as error:
        trust, is_alone = config.trust_remote_code, ranks is None and not budget.held_bytes
        macs = several_macs(checkpoint, budget.total_bytes, trust_remote_code=trust) if is_alone else ""
        raise ConfigError(error.message + macs) from None


def begin_drafting(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    slice_bytes: int = SLICE_BYTES,
    ranks: Ranks | None = None,
    proofs: Proofs | None = None,
) -> Loading[Model]:
    """Begin to load the model, and its MTP head if drafts are wanted. Raises ModelLoadError.

    Results in the `proofs` of another load are not tried again. With `ranks`, weights are read in slices in any case,
    because the whole tensors of a slice are in memory.
    """
    has_drafts, trust = config.wants_drafts and ranks is None, config.trust_remote_code
    return begin_loading(
        checkpoint,
        trust_remote_code=trust,
        text_only=config.text_only,
        has_drafts=has_drafts,
        beside=HeadLoader(checkpoint, config.draft_model, trust_remote_code=trust) if has_drafts else None,
        proofs=proofs,
        slice_bytes=slice_bytes if ranks is None else SLICE_BYTES,
        lockstep=ranks,
    )


def agreed(ranks: Ranks, measured: MeasuredModel, budget: Budget) -> tuple[MeasuredModel, Budget]:
    """Return the sizes that hold on every rank: the least memory, and the most that a chunk takes.

    The state of a row takes the same on all of them, because mlx-lm divides equally or not at all.
    """
    calibration, weights = measured.calibration, weights_bytes(measured.model.weights)
    told = ranks.exchange("sizes", [budget.total_bytes - weights, calibration.chunk_bytes_per_token])
    free_bytes, chunk_bytes = zip(*told, strict=True)
    calibration = replace(calibration, chunk_bytes_per_token=max(chunk_bytes))
    return replace(measured, calibration=calibration), Budget(weights + min(free_bytes))


def no_drafts(config: EngineConfig, model: Model) -> str | None:
    """Return the reason why no drafts are verified; None if they are."""
    if config.repeatable:  # a forward pass of several tokens rounds in another way
        return f"{setting('repeatable')} is set"
    return f"{setting('num_draft_tokens')} is 0" if config.num_draft_tokens == 0 else model.no_drafts


def is_much_wired(wired: int | None) -> bool:
    """Return whether loading a model deserves a warning while this much of the machine's memory is wired."""
    return wired is not None and wired > device_memory().total_bytes * _MUCH_WIRED


def _log_wired_memory() -> None:
    wired, total = wired_bytes(), device_memory().total_bytes
    if wired is None:
        return
    logger.info("Wired before load: %s of %s", readable(wired), readable(total))
    if is_much_wired(wired):
        logger.warning(
            "%s of %s are wired already. A killed server may have left them; a restart of the Mac frees them",
            readable(wired),
            readable(total),
        )


def _wire(config: EngineConfig, model: Model) -> None:
    if config.wired == "none":
        return
    weights = weight_arrays(model.weights)
    mx.eval(weights)
    if (reason := wire_weights(weights, device_memory())) is not None:
        logger.warning("The weights are not wired: %s", reason)


def within_kernels(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """Limit prefill chunks to lengths that Metal's kernels compute right."""
    longest = longest_chunk(checkpoint.config) if mx.metal.is_available() else None
    if longest is None or config.max_prefill_chunk <= longest:
        return config
    logger.warning(
        "%s is lowered from %d to %d: Metal computes longer chunks of this mixture of experts wrong",
        setting("max_prefill_chunk"),
        config.max_prefill_chunk,
        longest,
    )
    return replace(config, max_prefill_chunk=longest)


def one_chunk(config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, budget: Budget) -> EngineConfig:
    """Limit the context of a model whose prompts are not cut to one prefill chunk. Raises ConfigError."""
    if measured.model.no_chunks is None:
        return config
    wanted = config.max_model_len or checkpoint.max_model_len or _DEFAULT_MODEL_LEN
    length = min(wanted, longest_chunk(checkpoint.config) or wanted) if mx.metal.is_available() else wanted
    while True:
        whole = replace(config, max_prefill_chunk=length, max_model_len=length)
        try:
            engine_facts(whole, checkpoint, measured, attention_cost(whole, checkpoint, measured, budget), budget)
            break
        except ConfigError:
            if length == 1:
                raise
            length //= 2
    if length < wanted and config.max_model_len is not None:
        reason = f"{measured.model.no_chunks}, so it is computed whole, and at most {length} tokens at once"
        raise ConfigError(f"{setting('max_model_len')} {wanted} is too long: {reason}. Lower it.")
    if length < wanted:
        logger.warning("Context limited to %d of %d tokens, because a prompt is computed whole", length, wanted)
    return whole


def attention_cost(
    config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, budget: Budget
) -> AttentionCost:
    """Return the memory for a chunk's attention scores. Beyond a small part, kernels that keep none are forced."""
    wanted = config.max_model_len or checkpoint.max_model_len or _DEFAULT_MODEL_LEN
    pair_bytes = score_bytes(measured.calibration.attention, on_metal=mx.metal.is_available())
    if measured.model.no_chunks is not None:
        return AttentionCost(bytes_per_pair=pair_bytes, room_bytes=pair_bytes * wanted**2)
    return AttentionCost.within(
        budget.scores_bytes,
        bytes_per_pair=pair_bytes,
        max_chunk=config.max_prefill_chunk,
        max_tokens=min(wanted, measured.model.footprint.max_tokens(budget.free_bytes)),
    )


def pacer_of(
    config: EngineConfig, calibration: Calibration, attention: AttentionCost, *, whole_prompts: bool = False
) -> PrefillPacer:
    return PrefillPacer(
        max_stall_s=None if config.max_stall_ms is None else config.max_stall_ms / 1000,
        max_chunk=config.max_prefill_chunk,
        tokens_per_s=calibration.tokens_per_s,
        overhead_s=calibration.overhead_s,
        half_share=calibration.half_share,
        long_probe_s=calibration.long_probe_s,
        attention=attention,
        whole_prompts=whole_prompts,
    )


def forced_bytes(budget: Budget, calibration: Calibration) -> int:
    """Return bytes of attention scores from which on a kernel that keeps none is forced; 0 if no layer needs that."""
    return budget.forced_bytes if can_force(calibration.attention) else 0


def engine_facts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    measured: MeasuredModel,
    attention: AttentionCost,
    budget: Budget,
    task: Task = "chat",
) -> EngineFacts:
    """Raise ConfigError if the context that was asked for does not fit."""
    model = measured.model
    memory = _memory(config, measured, attention, budget)
    info = ModelInfo(
        model=config.model,
        architecture=checkpoint.architecture,
        max_model_len=_model_len(config, checkpoint, memory, model.footprint),
        weights_bytes=memory.weights_bytes,
        vocab_size=model.vocab_size,
        takes_images=measured.images is not None,
        task=task,
        created=int(time.time()),
        **usual_sampling(config.defaults, checkpoint_defaults(read_json(checkpoint.path / "generation_config.json"))),
    )
    return EngineFacts(
        info=info,
        memory=memory,
        footprint=model.footprint,
        calibration=measured.calibration,
        resume_rule=model.resume_rule,
        video_fault=measured.video_fault,
        max_pixels=None if measured.images is None else measured.images.max_pixels,
        is_recurrent=model.is_recurrent,
        copied_whole=model.copied_whole,
        no_prefix_cache=model.no_prefix_cache,
        no_shared_forward=model.no_shared_forward,
        no_drafts=no_drafts(config, model),
        no_head=model.no_head,
    )


def _memory(config: EngineConfig, measured: MeasuredModel, attention: AttentionCost, budget: Budget) -> MemoryBudget:
    images = measured.images
    chunk_bytes = int(measured.calibration.chunk_bytes_per_token * config.max_prefill_chunk)
    chunk_bytes += max(attention.room_bytes, forced_bytes(budget, measured.calibration))
    weights = weights_bytes(measured.model.weights)
    copied_bytes = max(layers.SLICE_BYTES, measured.model.footprint.layer_bytes(max(0, budget.free_bytes - weights)))
    join_bytes = min(budget.join_bytes, copied_bytes) if measured.model.can_batch else 0
    transient_bytes = max(chunk_bytes, join_bytes, 0 if images is None else images.encoder_bytes)
    return _divided(config, budget, weights, transient_bytes, takes_images=images is not None)


def _divided(
    config: EngineConfig, budget: Budget, weights: int, transient_bytes: int, *, takes_images: bool
) -> MemoryBudget:
    return MemoryBudget(
        total_bytes=budget.total_bytes,
        held_bytes=budget.held_bytes,
        weights_bytes=weights,
        transient_bytes=transient_bytes,
        encoder_inputs_bytes=min(_MAX_IMAGES_BYTES, budget.inputs_bytes) if takes_images else 0,
        decoded_bytes=min(config.media.media_cache_bytes, budget.inputs_bytes) if takes_images else 0,
        rendered_bytes=min(_MAX_RENDERED_BYTES, budget.rendered_bytes) if takes_images else 0,
        grammars_bytes=min(MAX_BYTES, budget.inputs_bytes),
    )


def least_memory(config: EngineConfig, checkpoint: Checkpoint, budget: Budget, weights: int) -> MemoryBudget:
    """Return the sizes before a load, which measures a step: here a step takes the least. Raises ConfigError."""
    chunk = within_kernels(config, checkpoint).max_prefill_chunk
    chunk_bytes = chunk * _least_bytes_per_token(checkpoint)
    if not mx.metal.is_available():  # scores are kept
        wanted = config.max_model_len or checkpoint.max_model_len or _DEFAULT_MODEL_LEN
        pair_bytes = score_bytes(assumed(checkpoint.config), on_metal=False)
        cost = AttentionCost.within(budget.scores_bytes, bytes_per_pair=pair_bytes, max_chunk=chunk, max_tokens=wanted)
        chunk_bytes += cost.room_bytes
    step_bytes = max(chunk_bytes, min(budget.join_bytes, layers.SLICE_BYTES))
    takes_images = checkpoint.has_vision_encoder and not config.text_only
    return _divided(config, budget, weights, step_bytes, takes_images=takes_images)


def _least_bytes_per_token(checkpoint: Checkpoint) -> int:
    """Return the least activations of a chunk: two states and three results of a feed-forward layer, in 16 bits."""
    text = text_config(checkpoint.config)
    width = text.get("intermediate_size") or 0  # gemma3n has a list, with the width of each layer
    width = max(width) if isinstance(width, list) else width
    return int(2 * (2 * text.get("hidden_size", 0) + 3 * width))


def _model_len(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryBudget, footprint: RowFootprint) -> int:
    """Return the context window: the flag's or the checkpoint's, as far as memory holds one row of that length."""
    declared = checkpoint.max_model_len or _DEFAULT_MODEL_LEN
    wanted = config.max_model_len or declared
    fitting = footprint.max_tokens(memory.rows_bytes)
    if fitting >= wanted:
        return wanted
    if config.max_model_len is not None or fitting < 2:
        raise ConfigError(
            f"Too little memory for {setting('max_model_len')} {wanted}: {fitting} tokens of context fit together with "
            f"the weights; {Budget(memory.total_bytes, memory.held_bytes).text}. Lower it, use a smaller model, or "
            f"raise {setting('memory_budget')}."
        )
    logger.warning("Context limited to %d of %d tokens by the memory budget", fitting, declared)
    return fitting
