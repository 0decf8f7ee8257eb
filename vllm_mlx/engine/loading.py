"""From a checkpoint to an engine that serves: the parts of each model, the engine, threads and client."""

import logging
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import mlx.core as mx

from ..cache.media import MediaCache
from ..cache.snapshot import STATE_VERSION
from ..cache.stats import DiskReport
from ..cache.tree import MemoryAwarePrefixCache
from ..core.catalogue import Catalogue, Entry
from ..core.config import DEFAULT_MAX_PIXELS, EngineConfig
from ..core.errors import ConfigError, about, setting
from ..core.memory import Budget, MemoryBudget, readable
from ..core.stage import UNSEEN, LoadStage
from ..disk.faults import FolderUnusable
from ..disk.folder import Folder
from ..disk.kept import NO_MEMORIES, Memories
from ..disk.place import default_daily_bytes, default_max_bytes, floor_bytes, folder_of, prepare
from ..disk.tier import DiskTier
from ..formats.tokenizer import Tokenizer
from ..media.loader import MediaLoader, image_decoders
from ..media.sources import MediaRoot
from ..media.vision import VisionProbe, VisionProcessor
from ..prompt.processor import RequestProcessor
from ..prompt.reply_formats import check_parsers, reply_formats
from ..prompt.texts import RerankPrompts, TextTokenizer
from ..ranks.figures import figures
from ..ranks.leader import Leader
from ..ranks.lockstep import Ranks
from ..ranks.sums import check_link
from ..ranks.worker import Worker
from ..runner.attention import memory_saving
from ..runner.calibrate import Calibration, ImageCost, warm_up
from ..runner.checkpoint import Checkpoint, find_checkpoint
from ..runner.device import DeviceWatch, apply_limits, cache_limit_bytes, device_memory, max_stored_buffers
from ..runner.encoder import EncoderModel
from ..runner.encoder_checkpoint import read_encoder
from ..runner.load_model import advising
from ..runner.loading import Loading
from ..runner.model import Model, MultimodalModel, weight_arrays
from ..runner.proofs import Proofs
from ..runner.runner import Runner, Unfenced
from ..runner.vision_inputs import Features
from ..scheduler.depth import DepthController
from ..scheduler.image_planner import MLLMScheduler
from ..scheduler.prefill_pacer import PrefillPacer
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.reranking import RerankScheduler
from ..scheduler.scheduler import Scheduler
from ..scheduler.speculation import MOST, Speculation
from .client import EngineClient, Parts
from .encoding import load_encoder, unread_encoder
from .engine import EngineThread, LLMEngine
from .front import Front, ReplyKeeper
from .lane import Assembly, ServedModel, Source
from .macos import SystemWatch, memory_calls
from .media_requests import MediaRequests
from .preparing import PromptPool
from .sizing import (
    MeasuredModel,
    agreed,
    attention_cost,
    begin_drafting,
    budget_of,
    engine_facts,
    forced_bytes,
    least_memory,
    load_measured,
    measuring,
    no_drafts,
    one_chunk,
    pacer_of,
    unread,
    within_kernels,
)

logger = logging.getLogger(__name__)
_SEVERAL_MACS = "each of several Macs holds a part of it, in memory only"  # journals of replies are kept
_MEDIA_SHARE = 8  # cached encoded images take at most an eighth of the memory for rows


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """The folder, owned by this process, and its part of reports: without a folder, the reason."""

    report: DiskReport
    folder: Folder | None = None

    def memories(self) -> Memories:
        """Return the memories that a restarted server needs for the same prompts; `of` gives those of a checkpoint."""
        return NO_MEMORIES if self.folder is None else Memories.at(self.folder, "", cap_bytes=self.report.max_bytes)

    def serve(self, engine: LLMEngine) -> None:
        """Keep the prefix caches of the engine's models in the folder. Called on the engine thread."""
        tree, tier = engine.cache_tree, engine.disk
        if tree is None:
            return
        if tier is None and self.folder is not None:
            tier = DiskTier(self.folder, tree, report=self.report)
        for model in engine.models:
            if tier is not None and (cache := model.scheduler.prefix_cache) is not None:
                tier.store.add_model(cache.fingerprint, model.facts.info.model)
        if tier is not None and tier is not engine.disk:
            tier.tick(is_idle=True)  # it reads the index, so that the first request finds the records
        engine.attach(tier, self.report)

    def close(self) -> None:
        """Free the folder if the start has failed. `Memories.close` frees it otherwise."""
        if self.folder is not None:
            self.folder.close()


def open_disk(config: EngineConfig) -> OpenDisk | None:
    """Return None if a setting turns the cache on disk off."""
    if config.cache_disk_bytes == 0 or not config.prefix_cache:
        return None
    path = folder_of(config.cache_dir)
    report = DiskReport(folder=str(path))
    if (fault := prepare(path)) is not None:
        return _no_disk(report, f"{fault}. Choose a folder that this user may write to with {setting('cache_dir')}.")
    max_bytes = default_max_bytes(path) if config.cache_disk_bytes is None else config.cache_disk_bytes
    daily_bytes = config.cache_disk_daily_bytes
    daily_bytes = default_daily_bytes(path) if daily_bytes is None else daily_bytes
    try:
        folder = Folder(path, max_bytes=max_bytes, daily_bytes=daily_bytes, floor_bytes=floor_bytes(path))
    except FolderUnusable as error:
        return _no_disk(report, str(error))
    off_reason = _SEVERAL_MACS if config.tensor_parallel_size > 1 else None
    return OpenDisk(replace(report, max_bytes=max_bytes, daily_bytes=daily_bytes, off_reason=off_reason), folder)


def _no_disk(report: DiskReport, reason: str) -> OpenDisk:
    logger.warning("Nothing is kept on disk: %s", reason)
    return OpenDisk(replace(report, off_reason=reason))


def fingerprint(checkpoint: Checkpoint, model: Model) -> str:
    """Name everything that cached state depends on: checkpoint, head, library, device and versions.

    A release of this server alone keeps the cache: `STATE_VERSION` is raised when the state itself changes.
    """
    kind, library = ("vision", "mlx-vlm") if isinstance(model, MultimodalModel) else ("text", "mlx-lm")
    if model.num_head_layers:  # the head's state is a part of a row's
        kind += f"_mtp{model.head_digest[:16]}"
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    versions = f"{version('mlx')},{version(library)},{STATE_VERSION}".replace("-", "_")
    return f"{checkpoint.fingerprint()}-{kind}-{device}-{versions}"


def start_engine(
    config: EngineConfig,
    disk: OpenDisk | None = None,
    models: Catalogue | None = None,
    ranks: Ranks | None = None,
    stage: LoadStage = UNSEEN,
) -> EngineClient:
    """Find the checkpoints of the models, download them if necessary, and load them. Raises ConfigError.

    `disk`: the result of `open_disk` for the same settings. If it is None, nothing is kept on disk. Without `models`,
    the settings are those of the only model. With `ranks`, this process is rank 0 of one model.
    `stage` is called with each stage.
    """
    entries = models.entries if models is not None else (Entry(config=config, name=config.model),)
    with ExitStack() as undone:
        if disk is not None:
            undone.callback(disk.close)
        if (len(entries) > 1 or (models is not None and models.places)) and config.no_unload is not None:
            raise ConfigError(f"{config.no_unload} Serve one model only, or leave it out.")
        memories = NO_MEMORIES if disk is None else disk.memories()
        undone.callback(memories.close)
        sources: list[Source] = []
        for entry in entries:
            with about(entry.name if len(entries) > 1 else None):
                own = config.with_model(entry.config)
                check_settings(own)
                checkpoint = find_checkpoint(own.model, own.revision, trust_remote_code=own.trust_remote_code)
                own_memories = memories.of(checkpoint.fingerprint())
                source = prepared(entry.name, own, checkpoint, own_memories)
                sources.append(replace(source, pin=entry.pin, stage=stage))
        thread = EngineThread(lambda: load_engines(sources, disk, ranks, config))
        thread.start()
        parts = thread, PromptPool(), image_decoders()
        fronts = [front_of(source, model, parts) for source, model in zip(sources, thread.models, strict=True)]
        undone.pop_all()
    first = sources[0] if sources else None
    return EngineClient(first.config if first else config, fronts, first.memories if first else memories, parts)


def prepared(name: str, config: EngineConfig, checkpoint: Checkpoint, memories: Memories) -> Source:
    """Load the parts that prepare prompts for a model, on any thread. Raises ConfigError."""
    tokenizer = checked_tokenizer(config, checkpoint)
    formats, encoder = reply_formats(config, tokenizer), read_encoder(checkpoint, config)
    if encoder is not None and config.tensor_parallel_size > 1:
        raise ConfigError(f"{config.model} is for {encoder.task}, which several Macs do not share. Serve it on one.")
    vision = None if encoder is not None else load_vision(config, checkpoint, tokenizer)
    source = Source(name=name, config=config, checkpoint=checkpoint, memories=memories)
    return replace(source, tokenizer=tokenizer, formats=formats, vision=vision, encoder=encoder)


def front_of(source: Source, model: ServedModel, parts: Parts) -> Front:
    config, vision, facts, (thread, pool, decoders) = source.config, source.vision, model.facts, parts
    assert source.tokenizer is not None and source.formats is not None
    kind = RerankPrompts if source.encoder is not None and source.encoder.is_causal else TextTokenizer
    if vision is not None:
        vision.set_memory(facts.memory)
    processor = RequestProcessor(
        source.tokenizer,
        config,
        source.checkpoint.path,
        formats=source.formats,
        max_model_len=facts.info.max_model_len,
        vocab_size=facts.info.vocab_size,
        max_grammars_bytes=facts.memory.grammars_bytes,
        vision=vision,
        memories=source.memories,
        has_drafts=facts.no_drafts is None,
        resumes_anywhere=facts.resume_rule is None or facts.resume_rule.resumes_anywhere,
        texts=None if source.encoder is None else kind(source.tokenizer, source.encoder, facts.info.vocab_size),
    )
    limits = replace(config.media, media_cache_bytes=facts.memory.decoded_bytes)
    sampling, takes_images = (None, False) if vision is None else (vision.frame_sampling, True)
    root = MediaRoot(limits.media_root)
    loader = MediaLoader(limits, root, sampling=sampling, takes_images=takes_images, decoders=decoders)
    front = Front(
        name=source.name,
        config=config,
        facts=facts,
        vision=vision,
        processor=processor,
        media=MediaRequests(vision, loader, thread.wake),
        keeper=ReplyKeeper(processor, pool, thread.keep if config.prefix_cache and source.encoder is None else None),
        memories=source.memories,
    )
    front.measured(facts)
    model.front = front
    return front


def load_vision(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> VisionProcessor | None:
    """Return the checkpoint's image processor; None without a vision encoder, or if only text is served."""
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


def load_engines(
    sources: Items[Source], disk: OpenDisk | None = None, ranks: Ranks | None = None, config: EngineConfig | None = None
) -> LLMEngine:
    """Load and measure the models that have room, pinned ones first, and size everything to the available memory.

    Any other model is measured at its first load. Raises ConfigError. With `ranks`, there is one model, and nothing of
    its cache is kept on disk.
    """
    if ranks is not None:
        engine = _load_leader(sources[0], ranks)
        if disk is not None:
            engine.attach(None, disk.report)
        return engine
    budget = budget_of(config or sources[0].config)
    apply_limits(budget.total_bytes)
    watch, found = device_watch(budget), dict[str, ServedModel]()
    for source in sorted(sources, key=lambda source: not source.pin):
        pinned_bytes = sum(other.checkpoint.file_bytes for other in sources if other.pin and other is not source)
        with about(source.name if len(sources) > 1 else None):
            own_budget, weights_bytes = budget_of(source.config, pinned_bytes), source.checkpoint.file_bytes
            is_read = source.pin or not found
            if not is_read:
                least = least_memory(source.config, source.checkpoint, own_budget, weights_bytes)
                is_read = not _lacks_room(found.values(), budget, least)
            found[source.name] = load(source, own_budget, watch, list(found.values()), is_read=is_read)
    engine = LLMEngine([found[source.name] for source in sources], watch)
    for model in reversed(found.values()):
        if model.may_leave and _lacks_room(engine.models, budget):
            engine.evict(model)
    if disk is not None:
        disk.serve(engine)
    return engine


def _lacks_room(models: Iterable[ServedModel], budget: Budget, coming: MemoryBudget | None = None) -> bool:
    """Return whether these models, one that comes, and a step have no room together."""
    step_bytes, held_bytes = 0, 0
    for model in models:
        step_bytes, held_bytes = max(step_bytes, model.memory.transient_bytes), held_bytes + model.held_bytes
    if coming is not None:
        held_bytes += coming.weights_bytes + coming.media_bytes + coming.grammars_bytes
        step_bytes = max(step_bytes, coming.transient_bytes)
    return held_bytes + step_bytes > budget.total_bytes


def load(
    source: Source, budget: Budget, watch: DeviceWatch, before: Items[ServedModel], *, is_read: bool
) -> ServedModel:
    """Load and measure a model, or assemble it by the headers of its files."""
    source.stage.model = source.name
    source = replace(source, config=within_kernels(source.config, source.checkpoint))
    if source.encoder is not None and not source.encoder.is_causal:
        if is_read:
            return _served(*load_encoder(source, source.encoder, budget, watch))
        return _served(unread_encoder(source, source.encoder, budget, watch))
    probe = None if source.vision is None else source.vision.probe()
    tree = next((cache.tree for model in before if (cache := model.scheduler.prefix_cache) is not None), None)
    if not is_read:
        measured = unread(source.config, source.checkpoint, budget, probe)
        return _served(assemble(source, measured, budget, watch, tree))
    measured = load_measured(source.config, source.checkpoint, probe, budget, stage=source.stage)
    source.stage.begin("trying replies")
    warm_up(measured.model, has_drafts=no_drafts(source.config, measured.model) is None)
    return _served(assemble(source, measured, budget, watch, tree), measured.model)


def _served(assembly: Assembly, model: Model | EncoderModel | None = None) -> ServedModel:
    """Return the served model, with its weights if they were read."""
    served = ServedModel(assembly)
    if model is not None:
        served.start(model)
    return served


def _load_leader(source: Source, ranks: Ranks) -> LLMEngine:
    source, measured, budget = _load_in_lockstep(source, ranks)
    watch = device_watch(budget)
    model = _served(assemble(source, measured, budget, watch, ranks=ranks), measured.model)
    _loaded(ranks, watch)
    engine = LLMEngine([model], watch)
    engine.rank_reports = ranks.watch.rows
    return engine


def work(config: EngineConfig, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Load this rank's shard, and carry out the plans of rank 0 until it stops. Raises ConfigError, or what failed."""
    source = Source(name=config.model, config=config, checkpoint=checkpoint)
    _, measured, budget = _load_in_lockstep(source, ranks)
    watch = device_watch(budget)
    worker = Worker(measured.model, watch, prefill_context(measured.calibration, budget), ranks)
    _loaded(ranks, watch)
    worker.work()


def _loaded(ranks: Ranks, watch: DeviceWatch) -> None:
    ranks.exchange("loaded", True)
    ranks.watch.report = lambda: figures(watch.usage(), ranks.link.sum_s)
    ranks.watch.ready()


def _load_in_lockstep(source: Source, ranks: Ranks) -> tuple[Source, MeasuredModel, Budget]:
    source.stage.model, checkpoint = source.name, source.checkpoint
    config = within_kernels(source.config, checkpoint)
    budget = budget_of(config)
    check_link(ranks, checkpoint, config.max_prefill_chunk)
    measured = load_measured(config, checkpoint, budget=budget, ranks=ranks, stage=source.stage)
    warm_up(measured.model, fences=Unfenced)
    return replace(source, config=config), *agreed(ranks, measured, budget)


@dataclass(eq=False, kw_only=True)
class ModelAssembly(Assembly):
    """A model that generates. With `ranks`, this is rank 0, and its runner leads the others."""

    budget: Budget
    watch: DeviceWatch
    proofs: Proofs | None  # of the first load; None before
    media: MediaCache[Features] | None  # features of images, which outlive the weights
    probe: VisionProbe | None  # with which the first load measures a model that takes images
    ranks: Ranks | None = None

    def begin(self) -> Loading[Model]:
        self.source.checkpoint.check_unchanged(self.identity)
        return begin_drafting(self.source.config, self.source.checkpoint, proofs=self.proofs)

    def run(self, model: Model) -> Runner:
        if isinstance(model, MultimodalModel):
            model.forget_images(self.media)
        saving, cache = prefill_context(self.facts.calibration, self.budget), self.scheduler.prefix_cache
        if self.ranks is not None:
            return Leader(model, self.watch, saving, self.ranks, None if cache is None else cache.tree)
        return Runner(model, self.watch, saving, has_drafts=self.scheduler.speculation is not None)

    def measure(self, model: Model) -> Generator[None, None, Assembly]:
        config, checkpoint, cache = self.source.config, self.source.checkpoint, self.scheduler.prefix_cache
        measured = yield from measuring(config, checkpoint, model, self.probe, UNSEEN)
        yield
        warm_up(model, has_drafts=no_drafts(config, model) is None)
        return assemble(self.source, measured, self.budget, self.watch, None if cache is None else cache.tree)


def assemble(
    source: Source,
    measured: MeasuredModel,
    budget: Budget,
    watch: DeviceWatch,
    tree: MemoryAwarePrefixCache | None = None,
    ranks: Ranks | None = None,
) -> Assembly:
    """Build all parts of a measured model except its weights. `tree` is that of the other models, if there is one.

    With `ranks`, this is rank 0, and its runner leads the others. Raises ConfigError.
    """
    checkpoint, is_reranker = source.checkpoint, source.encoder is not None
    config = one_chunk(source.config, checkpoint, measured, budget)
    attention = attention_cost(config, checkpoint, measured, budget)
    facts = engine_facts(config, checkpoint, measured, attention, budget, "rerank" if is_reranker else "chat")
    pacer = pacer_of(config, measured.calibration, attention, whole_prompts=measured.model.no_chunks is not None)
    cache = _prefix_planner(config, checkpoint, measured, facts.memory, tree)
    kind = RerankScheduler if is_reranker else Scheduler
    scheduler = make_scheduler(config, measured.model, facts.memory, pacer, cache, measured.images, kind)
    watch.raise_cache_limit(cache_limit_bytes(budget.total_bytes, facts.memory.transient_bytes))
    return ModelAssembly(
        source=source,
        scheduler=scheduler,
        facts=facts,
        room_bytes=max(array.nbytes for array in weight_arrays(measured.model.weights)),
        load_s=measured.load_s,
        is_measured=not measured.is_assumed,
        budget=budget,
        watch=watch,
        identity=checkpoint.fingerprint(),
        proofs=None if measured.is_assumed else Proofs.of(measured.model),
        media=measured.model.media,
        probe=measured.probe,
        ranks=ranks,
    )


def prefill_context(calibration: Calibration, budget: Budget) -> Callable[[], AbstractContextManager[None]]:
    return partial(memory_saving, calibration.attention, forced_bytes(budget, calibration))


def device_watch(budget: Budget) -> DeviceWatch:
    device, total = device_memory(), budget.total_bytes
    return DeviceWatch(
        device.limit_bytes(total),
        device.process_limit_bytes(total),
        SystemWatch(memory_calls()),
        cache_limit_bytes(total),
    )


def make_scheduler(
    config: EngineConfig,
    model: Model,
    memory: MemoryBudget,
    pacer: PrefillPacer,
    cache: PrefixPlanner | None,
    images: ImageCost | None = None,
    planner: type[Scheduler] = Scheduler,
) -> Scheduler:
    return planner(
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


def _image_planner(model: MultimodalModel, memory: MemoryBudget, cost: ImageCost | None) -> MLLMScheduler:
    return MLLMScheduler(
        model.media,
        max_bytes=memory.rows_bytes // _MEDIA_SHARE,
        bytes_per_token=0 if cost is None else cost.feature_bytes_per_token,
        bidirectional=model.bidirectional_images,
    )


def _prefix_planner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    measured: MeasuredModel,
    memory: MemoryBudget,
    tree: MemoryAwarePrefixCache | None,
) -> PrefixPlanner | None:
    """Return None if the prefix cache is off. `tree` is the other models', if there is one."""
    model, s_per_token = measured.model, 1 / measured.calibration.tokens_per_s
    if not config.prefix_cache:
        return None
    if model.resume_rule is None:
        logger.warning("The prefix cache is off for %s: %s", checkpoint.architecture, model.no_prefix_cache)
        return None
    max_bytes = min(memory.rows_bytes, config.cache_memory_bytes or memory.rows_bytes)
    if tree is None:
        tree = MemoryAwarePrefixCache(max_bytes=max_bytes, max_buffers=max_stored_buffers())
    tree.add_model(name := fingerprint(checkpoint, model), model.resume_rule, s_per_token=s_per_token)
    return PrefixPlanner(
        tree,
        name,
        model.resume_rule,
        model.footprint,
        max_bytes=max_bytes,
        snapshot_every=config.snapshot_every,
    )


def check_settings(config: EngineConfig) -> None:
    """Check the settings that do not depend on the checkpoint. Raises ConfigError."""
    MediaRoot(config.media.media_root)
    check_parsers(config)
    machine_bytes = device_memory().total_bytes
    if config.memory_budget_bytes is not None and config.memory_budget_bytes > machine_bytes:
        raise ConfigError(
            f"{setting('memory_budget')} {readable(config.memory_budget_bytes)} is more than this machine has, "
            f"{readable(machine_bytes)}. Lower it."
        )


def checked_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raises ConfigError for settings that do not fit the checkpoint's files."""
    declared, wanted = checkpoint.max_model_len, config.max_model_len
    if declared is not None and wanted is not None and wanted > declared:
        raise ConfigError(f"{setting('max_model_len')} {wanted} exceeds the checkpoint's context of {declared} tokens.")
    tokenizer = Tokenizer.load(
        checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
    )
    if config.chat_template is not None and (fault := tokenizer.template_fault()) is not None:
        raise ConfigError(f"{setting('chat_template')} is not a Jinja template: {fault}.")
    return tokenizer
