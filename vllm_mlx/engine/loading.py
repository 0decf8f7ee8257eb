"""From a checkpoint to an engine that serves: a measured model, sizes that fit this machine, threads and client."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..cache.tree import PrefixTree
from ..core.config import DEFAULT_MAX_PIXELS, EngineConfig
from ..core.errors import ConfigError, setting
from ..core.memory import Budget, MemoryBudget
from ..disk.kept import NO_MEMORIES, Memories
from ..formats.tokenizer import Tokenizer
from ..media.loader import MediaLoader
from ..media.sources import MediaRoot
from ..media.vision import VisionProbe, VisionProcessor
from ..prompt.processor import RequestProcessor
from ..prompt.reply_formats import check_parsers, reply_formats
from ..runner.attention import memory_saving
from ..runner.calibrate import ImageCost, warm_up
from ..runner.checkpoint import Checkpoint, find_checkpoint
from ..runner.device import (
    DeviceWatch,
    cache_limit_bytes,
    device_memory,
    max_stored_buffers,
)
from ..runner.loading import Loading
from ..runner.model import Model, MultimodalModel, weight_arrays
from ..runner.proofs import Proofs
from ..runner.runner import Runner
from ..scheduler.depth import DepthController
from ..scheduler.image_planner import ImagePlanner
from ..scheduler.prefill_pacer import PrefillPacer
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.scheduler import Scheduler
from ..scheduler.speculation import MOST, Speculation
from .client import EngineClient
from .disk import OpenDisk, fingerprint
from .engine import Engine
from .front import Front
from .generation import Preparations, ReplyKeeper
from .known import KnownFacts
from .lane import Reload
from .macos import SystemWatch, memory_calls
from .media_requests import MediaRequests
from .monitoring.status import model_facts
from .preparing import PromptPool
from .sizing import (
    MeasuredModel,
    attention_cost,
    begin_drafting,
    budget_of,
    engine_facts,
    forced_bytes,
    load_measured,
    no_drafts,
    within_kernels,
)
from .thread import EngineThread

logger = logging.getLogger(__name__)

_MEDIA_SHARE = 8  # encoded images that are kept take at most an eighth of what rows may take


def start_engine(config: EngineConfig, disk: OpenDisk | None = None) -> EngineClient:
    """Find the checkpoint, download it if necessary, and load it. Raises ConfigError.

    `disk`: the result of `open_disk` for the same settings. If it is None, nothing is kept on disk.
    """
    with ExitStack() as undone:
        if disk is not None:
            undone.callback(disk.close)
        check_settings(config)
        checkpoint = find_checkpoint(config.model, config.revision, trust_remote_code=config.trust_remote_code)
        memories = NO_MEMORIES if disk is None else disk.memories(checkpoint.fingerprint())
        undone.callback(memories.close)
        engine = serve_checkpoint(config, checkpoint, disk, memories=memories)
        undone.pop_all()
    return engine


def serve_checkpoint(
    config: EngineConfig,
    checkpoint: Checkpoint,
    disk: OpenDisk | None = None,
    *,
    memories: Memories = NO_MEMORIES,
) -> EngineClient:
    """Load everything, here and on the engine thread, and return when requests can come. Raises ConfigError.

    `memories` are the checkpoint's; the client closes them.
    """
    tokenizer = checked_tokenizer(config, checkpoint)
    formats = reply_formats(config, tokenizer)
    vision = load_vision(config, checkpoint, tokenizer)
    thread = _started_thread(config, checkpoint, vision, disk, KnownFacts.of(memories, config, checkpoint))
    processor = RequestProcessor(
        tokenizer,
        config,
        checkpoint.path,
        formats=formats,
        max_model_len=thread.facts.info.max_model_len,
        vocab_size=thread.facts.info.vocab_size,
        max_grammars_bytes=thread.facts.memory.grammars_bytes,
        vision=vision,
        memories=memories,
        has_drafts=thread.facts.no_drafts is None,
    )
    media = _media_requests(config, vision, thread)
    front = Front(
        name=config.model,
        facts=thread.facts,
        model_facts=model_facts(config, thread.facts, processor),
        processor=processor,
        preparations=Preparations(processor, media, pool := PromptPool(), max_prepare_s=config.max_prepare_s),
        keeper=ReplyKeeper(processor, pool, thread.keep if config.prefix_cache else None),
        memories=memories,
    )
    return EngineClient(config, [front], thread, pool)


def load_vision(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> VisionProcessor | None:
    """The checkpoint's image processor; None if it has no vision encoder or only text is served."""
    if config.text_only or not checkpoint.has_vision_encoder:
        return None
    return VisionProcessor.load(
        checkpoint.path,
        checkpoint.config,
        tokenizer,
        max_pixels=config.max_pixels or DEFAULT_MAX_PIXELS,
        trust_remote_code=config.trust_remote_code,
    )


def _started_thread(
    config: EngineConfig,
    checkpoint: Checkpoint,
    vision: VisionProcessor | None,
    disk: OpenDisk | None,
    known: KnownFacts,
) -> EngineThread:
    probe = None if vision is None else vision.probe()
    thread = EngineThread(lambda: load_engine(config, checkpoint, probe, disk, known))
    thread.start()
    if vision is not None:
        vision.set_memory(thread.facts.memory)
        vision.scale_down_to(thread.facts.max_pixels)
        if thread.facts.video_fault is not None:
            vision.refuse_videos(f"one was tried at load: {thread.facts.video_fault}")
    return thread


def _media_requests(config: EngineConfig, vision: VisionProcessor | None, thread: EngineThread) -> MediaRequests:
    media = replace(config.media, media_cache_bytes=thread.facts.memory.decoded_bytes)
    sampling, takes_images = (None, False) if vision is None else (vision.frame_sampling, True)
    loader = MediaLoader(media, MediaRoot(media.media_root), sampling=sampling, takes_images=takes_images)
    return MediaRequests(vision, loader, thread.wake)


def load_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    probe: VisionProbe | None = None,
    disk: OpenDisk | None = None,
    known: KnownFacts | None = None,
) -> Engine:
    """Load weights, measure what is not `known`, and size everything to the available memory. Raises ConfigError.

    A model that takes images is tested with `probe`. Without a probe it takes no images.
    """
    config = within_kernels(config, checkpoint)
    budget = budget_of(config)
    measured = load_measured(config, checkpoint, probe, budget, known)
    warm_up(measured.model, has_drafts=no_drafts(config, measured.model) is None)
    engine = build_engine(config, checkpoint, measured, budget)
    if disk is not None and (tree := engine.cache_tree) is not None:
        names = {fingerprint(checkpoint, measured.model): config.model}
        engine.attach(disk.start(tree, names), disk.report)
    return engine


def build_engine(
    config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, budget: Budget | None = None
) -> Engine:
    """Build an engine for a model that is loaded and measured already. Raises ConfigError."""
    budget = budget or budget_of(config)
    attention = attention_cost(config, checkpoint, measured, budget)
    facts = engine_facts(config, checkpoint, measured, attention, budget)
    pacer = PrefillPacer(
        max_stall_s=None if config.max_stall_ms is None else config.max_stall_ms / 1000,
        max_chunk=config.max_prefill_chunk,
        tokens_per_s=measured.calibration.tokens_per_s,
        overhead_s=measured.calibration.overhead_s,
        half_share=measured.calibration.half_share,
        attention=attention,
    )
    cache = _prefix_planner(config, checkpoint, measured, facts.memory)
    scheduler = make_scheduler(config, measured.model, facts.memory, pacer, cache, measured.images)
    device, total = device_memory(), budget.total_bytes
    system = SystemWatch(memory_calls())
    watch = DeviceWatch(
        device.limit_bytes(total),
        device.process_limit_bytes(total),
        system,
        cache_limit_bytes(total, facts.memory.transient_bytes),
    )
    run = partial(
        Runner,
        watch=watch,
        prefill_context=partial(memory_saving, measured.calibration.attention, forced_bytes(budget, measured)),
        has_drafts=scheduler.speculation is not None,
    )
    return Engine(scheduler, run(measured.model), watch, facts, _reload(config, checkpoint, measured, run))


def _reload(
    config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, run: Callable[[Model], Runner]
) -> Reload:
    proofs, media, fingerprint = Proofs.of(measured.model), measured.model.media, checkpoint.fingerprint()
    sizes = [array.nbytes for array in weight_arrays(measured.model.weights)]

    def begin() -> Loading[Model]:
        checkpoint.check_unchanged(fingerprint)
        return begin_drafting(config, checkpoint)

    def run_as_measured(model: Model) -> Runner:
        proofs.note_in(model)
        if isinstance(model, MultimodalModel):
            model.forget_images(media)
        return run(model)

    return Reload(
        begin=begin,
        run=run_as_measured,
        weights_bytes=sum(sizes),
        room_bytes=max(sizes),
        no_unload=config.no_unload,
        idle_unload_s=config.idle_unload_s,
    )


def make_scheduler(
    config: EngineConfig,
    model: Model,
    memory: MemoryBudget,
    pacer: PrefillPacer,
    cache: PrefixPlanner | None,
    images: ImageCost | None = None,
) -> Scheduler:
    return Scheduler(
        config,
        memory=memory,
        footprint=model.footprint,
        pacer=pacer,
        can_batch=model.can_batch,
        shares_forward=model.no_shared_forward is None,
        prefix_cache=cache,
        images=_image_planner(model, memory, images) if isinstance(model, MultimodalModel) else None,
        speculation=_speculation(config, model),
    )


def _speculation(config: EngineConfig, model: Model) -> Speculation | None:
    """Return None if no drafts are verified."""
    if no_drafts(config, model) is not None:
        return None
    most = MOST if config.num_draft_tokens == "auto" else config.num_draft_tokens
    depth = DepthController(most, fixed=config.num_draft_tokens != "auto", padded=model.is_recurrent)
    return Speculation(
        depth,
        model.vocab_size,
        shares_forward=model.no_shared_forward is None,
        state_bytes=model.footprint.fixed_bytes if model.is_recurrent else 0,
        has_head=model.num_head_layers > 0,
    )


def _image_planner(model: MultimodalModel, memory: MemoryBudget, cost: ImageCost | None) -> ImagePlanner:
    return ImagePlanner(
        model.media,
        max_bytes=memory.rows_bytes // _MEDIA_SHARE,
        bytes_per_token=0 if cost is None else cost.feature_bytes_per_token,
        bidirectional=model.bidirectional_images,
    )


def _prefix_planner(
    config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel, memory: MemoryBudget
) -> PrefixPlanner | None:
    """Return None if the prefix cache is off."""
    model, s_per_token = measured.model, 1 / measured.calibration.tokens_per_s
    if not config.prefix_cache:
        return None
    if model.resume_rule is None:
        logger.warning("The prefix cache is off for %s: %s", checkpoint.architecture, model.no_prefix_cache)
        return None
    max_bytes = min(memory.rows_bytes, config.cache_memory_bytes or memory.rows_bytes)
    return PrefixPlanner(
        PrefixTree(max_bytes=max_bytes, max_buffers=max_stored_buffers(), s_per_token=s_per_token),
        fingerprint(checkpoint, model),
        model.resume_rule,
        model.footprint,
        max_bytes=max_bytes,
        snapshot_every=config.snapshot_every,
    )


def check_settings(config: EngineConfig) -> None:
    """Check what does not depend on the checkpoint. Raises ConfigError."""
    MediaRoot(config.media.media_root)
    check_parsers(config)
    machine_bytes = device_memory().total_bytes
    if config.memory_budget_bytes is not None and config.memory_budget_bytes > machine_bytes:
        raise ConfigError(
            f"{setting('memory_budget')} {config.memory_budget_bytes / 1e9:.1f} GB is more than this machine has, "
            f"{machine_bytes / 1e9:.1f} GB. Lower it."
        )


def checked_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. Raises ConfigError for settings that do not fit the checkpoint's small files."""
    declared, wanted = checkpoint.max_model_len, config.max_model_len
    if declared is not None and wanted is not None and wanted > declared:
        raise ConfigError(f"{setting('max_model_len')} {wanted} exceeds the checkpoint's context of {declared} tokens.")
    tokenizer = Tokenizer.load(
        checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
    )
    if config.chat_template is not None and (fault := tokenizer.template_fault()) is not None:
        raise ConfigError(f"{setting('chat_template')} is not a Jinja template: {fault}.")
    return tokenizer
