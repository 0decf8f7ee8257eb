"""Builds the lane of a measured model: its scheduler, its cache, its runner, and how it is loaded again."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from ..cache.tree import PrefixTree
from ..core.config import EngineConfig
from ..core.memory import Budget, MemoryBudget
from ..ranks.leader import Leader
from ..ranks.lockstep import Ranks
from ..runner.attention import memory_saving
from ..runner.calibrate import ImageCost
from ..runner.checkpoint import Checkpoint
from ..runner.device import DeviceWatch, cache_limit_bytes, device_memory, max_stored_buffers
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
from .disk import fingerprint
from .lane import Assembly, ServedModel
from .macos import SystemWatch, memory_calls
from .monitoring.schema import EngineFacts
from .sizing import MeasuredModel, attention_cost, begin_drafting, engine_facts, forced_bytes, no_drafts, one_chunk

logger = logging.getLogger(__name__)

_MEDIA_SHARE = 8  # encoded images that are kept take at most an eighth of what rows may take


def assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    measured: MeasuredModel,
    budget: Budget,
    watch: DeviceWatch,
    tree: PrefixTree | None = None,
    *,
    name: str = "",
    pin: bool = False,
    ranks: Ranks | None = None,
) -> ServedModel:
    """Build a model that is measured already. Its weights are not in memory before `start`.

    `tree` is that of the models before, if there are any. With `ranks`, this is rank 0, and its runner leads the others.
    Raises ConfigError.
    """
    config = one_chunk(config, checkpoint, measured, budget)
    attention = attention_cost(config, checkpoint, measured, budget)
    facts = engine_facts(config, checkpoint, measured, attention, budget)
    pacer = PrefillPacer(
        max_stall_s=None if config.max_stall_ms is None else config.max_stall_ms / 1000,
        max_chunk=config.max_prefill_chunk,
        tokens_per_s=measured.calibration.tokens_per_s,
        overhead_s=measured.calibration.overhead_s,
        half_share=measured.calibration.half_share,
        long_probe_s=measured.calibration.long_probe_s,
        attention=attention,
        whole_prompts=measured.model.no_chunks is not None,
    )
    cache = _prefix_planner(config, checkpoint, measured, facts.memory, tree)
    scheduler = make_scheduler(config, measured.model, facts.memory, pacer, cache, measured.images)
    watch.raise_cache_limit(cache_limit_bytes(budget.total_bytes, facts.memory.transient_bytes))
    saving = prefill_context(measured, budget)
    run: Callable[[Model], Runner]
    if ranks is None:
        run = partial(Runner, watch=watch, prefill_context=saving, has_drafts=scheduler.speculation is not None)
    else:
        stored = None if cache is None else cache.tree
        run = partial(Leader, watch=watch, ranks=ranks, prefill_context=saving, tree=stored)
    assembly = _assembly(config, checkpoint, measured, run, scheduler, facts)
    return ServedModel(assembly, name=name, pin=pin, no_unload=config.no_unload, idle_unload_s=config.idle_unload_s)


def prefill_context(measured: MeasuredModel, budget: Budget) -> Callable[[], AbstractContextManager[None]]:
    return partial(memory_saving, measured.calibration.attention, forced_bytes(budget, measured))


def device_watch(budget: Budget) -> DeviceWatch:
    device, total = device_memory(), budget.total_bytes
    return DeviceWatch(
        device.limit_bytes(total),
        device.process_limit_bytes(total),
        SystemWatch(memory_calls()),
        cache_limit_bytes(total),
    )


def _assembly(
    config: EngineConfig,
    checkpoint: Checkpoint,
    measured: MeasuredModel,
    run: Callable[[Model], Runner],
    scheduler: Scheduler,
    facts: EngineFacts,
) -> Assembly:
    proofs, media, fingerprint = Proofs.of(measured.model), measured.model.media, checkpoint.fingerprint()
    sizes = [array.nbytes for array in weight_arrays(measured.model.weights)]

    def begin() -> Loading[Model]:
        checkpoint.check_unchanged(fingerprint)
        return begin_drafting(config, checkpoint, proofs=proofs)

    def run_as_measured(model: Model) -> Runner:
        if isinstance(model, MultimodalModel):
            model.forget_images(media)
        return run(model)

    return Assembly(
        scheduler=scheduler,
        facts=facts,
        begin=begin,
        run=run_as_measured,
        weights_bytes=sum(sizes),
        room_bytes=max(sizes),
        load_s=measured.load_s,
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
    config: EngineConfig,
    checkpoint: Checkpoint,
    measured: MeasuredModel,
    memory: MemoryBudget,
    tree: PrefixTree | None,
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
        tree = PrefixTree(max_bytes=max_bytes, max_buffers=max_stored_buffers())
    tree.add_model(name := fingerprint(checkpoint, model), model.resume_rule, s_per_token=s_per_token)
    return PrefixPlanner(
        tree,
        name,
        model.resume_rule,
        model.footprint,
        max_bytes=max_bytes,
        snapshot_every=config.snapshot_every,
    )
