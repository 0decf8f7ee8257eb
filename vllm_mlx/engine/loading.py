"""From a checkpoint to an engine that serves: a measured model, sizes that fit this machine, threads and client."""

import logging
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..core.catalogue import Catalogue, Entry
from ..core.config import DEFAULT_MAX_PIXELS, EngineConfig
from ..core.errors import ConfigError, about, setting
from ..core.fair_queue import FairThreads
from ..core.memory import Budget
from ..disk.kept import NO_MEMORIES, Memories
from ..formats.tokenizer import Tokenizer
from ..media.loader import MediaLoader, image_decoders
from ..media.sources import MediaRoot
from ..media.vision import VisionProcessor
from ..prompt.processor import RequestProcessor
from ..prompt.reply_formats import CheckpointFormats, check_parsers, reply_formats
from ..ranks.figures import figures
from ..ranks.lockstep import Ranks
from ..ranks.sums import check_link
from ..ranks.worker import Worker
from ..runner.calibrate import warm_up
from ..runner.checkpoint import Checkpoint, find_checkpoint
from ..runner.device import DeviceWatch, device_memory
from ..runner.load_model import advising
from ..runner.row_fences import Unfenced
from .client import EngineClient
from .disk import OpenDisk
from .engine import Engine
from .front import Front
from .generation import Preparations, ReplyKeeper
from .known import KnownFacts
from .lane import ServedModel
from .lane_parts import assemble, device_watch, prefill_context
from .media_requests import MediaRequests
from .monitoring.schema import EngineFacts
from .monitoring.status import model_facts
from .preparing import PromptPool
from .sizing import MeasuredModel, agreed, budget_of, load_measured, no_drafts, within_kernels
from .thread import EngineThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model before its weights are loaded."""

    name: str
    config: EngineConfig
    checkpoint: Checkpoint
    memories: Memories = NO_MEMORIES
    vision: VisionProcessor | None = None
    known: KnownFacts | None = None  # of an earlier start
    pin: bool = False  # its weights leave for no other model


def start_engine(
    config: EngineConfig,
    disk: OpenDisk | None = None,
    models: Catalogue | None = None,
    ranks: Ranks | None = None,
) -> EngineClient:
    """Find the checkpoints of the models, download them if necessary, and load them. Raises ConfigError.

    `disk`: the result of `open_disk` for the same settings. If it is None, nothing is kept on disk. Without `models`,
    the settings are those of the only model. With `ranks`, this process is rank 0 of one model.
    """
    entries = models.entries if models is not None else (Entry(config=config, name=config.model),)
    with ExitStack() as undone:
        if disk is not None:
            undone.callback(disk.close)
        if len(entries) > 1 and config.no_unload is not None:
            raise ConfigError(f"{config.no_unload} Serve one model only, or leave it out.")
        prepared: list[tuple[Source, Tokenizer, CheckpointFormats]] = []
        for entry in entries:
            with about(entry.name if len(entries) > 1 else None):
                own = config.with_model(entry.config)
                check_settings(own)
                checkpoint = find_checkpoint(own.model, own.revision, trust_remote_code=own.trust_remote_code)
                if prepared:
                    memories = prepared[0][0].memories.of(checkpoint.fingerprint())
                else:
                    memories = NO_MEMORIES if disk is None else disk.memories(checkpoint.fingerprint())
                    undone.callback(memories.close)
                source = Source(name=entry.name, config=own, checkpoint=checkpoint, memories=memories, pin=entry.pin)
                prepared.append(_prepare(source, has_ranks=ranks is not None))
        thread = EngineThread(lambda: load_engines([source for source, *_ in prepared], disk, ranks))
        thread.start()
        pool, decoders = PromptPool(), image_decoders()
        parts = zip(prepared, thread.facts, strict=True)
        fronts = [_front(*own, facts, thread, pool, decoders) for own, facts in parts]
        undone.pop_all()
    return EngineClient(prepared[0][0].config, fronts, thread, pool)


def _prepare(source: Source, *, has_ranks: bool) -> tuple[Source, Tokenizer, CheckpointFormats]:
    """Read the small files of the checkpoint. Raises ConfigError."""
    config, checkpoint = source.config, source.checkpoint
    tokenizer = checked_tokenizer(config, checkpoint)
    formats = reply_formats(config, tokenizer)
    vision = load_vision(config, checkpoint, tokenizer)
    known = None if has_ranks else KnownFacts.of(source.memories, config, checkpoint)
    return replace(source, vision=vision, known=known), tokenizer, formats


def _front(
    source: Source,
    tokenizer: Tokenizer,
    formats: CheckpointFormats,
    facts: EngineFacts,
    thread: EngineThread,
    pool: PromptPool,
    decoders: FairThreads,
) -> Front:
    config, vision = source.config, source.vision
    if vision is not None:
        vision.set_memory(facts.memory)
        vision.scale_down_to(facts.max_pixels)
        if facts.video_fault is not None:
            vision.refuse_videos(f"one was tried at load: {facts.video_fault}")
    processor = RequestProcessor(
        tokenizer,
        config,
        source.checkpoint.path,
        formats=formats,
        max_model_len=facts.info.max_model_len,
        vocab_size=facts.info.vocab_size,
        max_grammars_bytes=facts.memory.grammars_bytes,
        vision=vision,
        memories=source.memories,
        has_drafts=facts.no_drafts is None,
        resumes_anywhere=facts.resume_rule is None or facts.resume_rule.resumes_anywhere,
    )
    media = _media_requests(config, vision, facts, thread, decoders)
    return Front(
        name=source.name,
        facts=facts,
        model_facts=model_facts(config, facts, processor),
        processor=processor,
        preparations=Preparations(processor, media, pool, max_prepare_s=config.max_prepare_s),
        keeper=ReplyKeeper(processor, pool, thread.keep if config.prefix_cache else None),
        memories=source.memories,
    )


def load_vision(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> VisionProcessor | None:
    """The checkpoint's image processor; None if it has no vision encoder or only text is served."""
    if config.text_only or not checkpoint.has_vision_encoder:
        return None
    with advising(checkpoint, trust_remote_code=config.trust_remote_code):
        return VisionProcessor.load(
            checkpoint.path,
            checkpoint.config,
            tokenizer,
            max_pixels=config.max_pixels or DEFAULT_MAX_PIXELS,
            trust_remote_code=config.trust_remote_code,
        )


def _media_requests(
    config: EngineConfig,
    vision: VisionProcessor | None,
    facts: EngineFacts,
    thread: EngineThread,
    decoders: FairThreads,
) -> MediaRequests:
    media = replace(config.media, media_cache_bytes=facts.memory.decoded_bytes)
    sampling, takes_images = (None, False) if vision is None else (vision.frame_sampling, True)
    root = MediaRoot(media.media_root)
    loader = MediaLoader(media, root, sampling=sampling, takes_images=takes_images, decoders=decoders)
    return MediaRequests(vision, loader, thread.wake)


def load_engines(sources: Items[Source], disk: OpenDisk | None = None, ranks: Ranks | None = None) -> Engine:
    """Load weights, measure, and size everything to the available memory. Raises ConfigError.

    A model of which something is not known is loaded once. Those that have no room then leave, the default last.
    With `ranks`, there is one model, and nothing of its cache is kept on disk.
    """
    if ranks is not None:
        engine = _load_leader(sources[0].config, sources[0].checkpoint, ranks)
        if disk is not None:
            engine.attach(None, disk.report)
        return engine
    models: list[ServedModel] = []
    budget = budget_of(sources[0].config)
    watch = device_watch(budget)
    for source in sources:
        pinned_bytes = sum(other.checkpoint.file_bytes for other in sources if other.pin and other is not source)
        with about(source.name if len(sources) > 1 else None):
            models.append(_load(source, budget_of(source.config, pinned_bytes), watch, models))
    engine = Engine(models, watch)
    if disk is not None and (tree := engine.cache_tree) is not None:
        caches = [(model.scheduler.prefix_cache, model.facts.info.model) for model in models]
        names = {cache.fingerprint: model for cache, model in caches if cache is not None}
        engine.attach(disk.start(tree, names), disk.report)
    return engine


def _load(source: Source, budget: Budget, watch: DeviceWatch, before: Items[ServedModel]) -> ServedModel:
    config, checkpoint = within_kernels(source.config, source.checkpoint), source.checkpoint
    tree = next((cache.tree for model in before if (cache := model.scheduler.prefix_cache) is not None), None)
    probe = None if source.vision is None else source.vision.probe()
    measured = load_measured(config, checkpoint, probe, budget, source.known)
    warm_up(measured.model, has_drafts=no_drafts(config, measured.model) is None)
    model = assemble(config, checkpoint, measured, budget, watch, tree, name=source.name, pin=source.pin)
    model.start(measured.model)
    return model


def _load_leader(config: EngineConfig, checkpoint: Checkpoint, ranks: Ranks) -> Engine:
    config, measured, budget = _load_in_lockstep(config, checkpoint, ranks)
    watch = device_watch(budget)
    model = assemble(config, checkpoint, measured, budget, watch, ranks=ranks)
    model.start(measured.model)
    _loaded(ranks, watch)
    engine = Engine([model], watch)
    engine.rank_reports = ranks.watch.rows
    return engine


def work(config: EngineConfig, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Load this rank's shard, and carry out the plans of rank 0 until it stops. Raises ConfigError, or what failed."""
    _, measured, budget = _load_in_lockstep(config, checkpoint, ranks)
    watch = device_watch(budget)
    worker = Worker(measured.model, watch, prefill_context(measured, budget), ranks)
    _loaded(ranks, watch)
    worker.work()


def _loaded(ranks: Ranks, watch: DeviceWatch) -> None:
    ranks.exchange("loaded", True)
    ranks.watch.report = lambda: figures(watch.usage(), ranks.link.sum_s)
    ranks.watch.ready()


def _load_in_lockstep(
    config: EngineConfig, checkpoint: Checkpoint, ranks: Ranks
) -> tuple[EngineConfig, MeasuredModel, Budget]:
    config = within_kernels(config, checkpoint)
    budget = budget_of(config)
    check_link(ranks, checkpoint, config.max_prefill_chunk)
    measured = load_measured(config, checkpoint, budget=budget, ranks=ranks)
    warm_up(measured.model, fences=Unfenced)
    return config, *agreed(ranks, measured, budget)


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
