"""schedule → decode → prefill → update, one step at a time, on the one thread that owns MLX."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cache.segment import ResumeRule
from ..cache.stats import Entry
from ..cache.tree import PrefixTree
from ..core.config import EngineConfig, ModelInfo
from ..core.errors import ConfigError, GenerationError
from ..core.memory import MemoryBudget, RowFootprint
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate, StepPlan
from ..processing.vision import VisionProbe
from ..runner.calibrate import Calibration, ImageCost, calibrate, calibrate_images
from ..runner.device import apply_limits, device_memory, device_usage
from ..runner.family_check import check_family
from ..runner.loader import Checkpoint, load_model, weights_bytes
from ..runner.model import Model
from ..runner.multimodal import MultimodalModel
from ..runner.runner import Runner
from ..scheduler.mllm import MLLMScheduler
from ..scheduler.pacing import PrefillPacer
from ..scheduler.prefix import PrefixCache
from ..scheduler.scheduler import Scheduler
from .report import EngineReport, MediaReport

logger = logging.getLogger(__name__)

_DEFAULT_MODEL_LEN = 32768  # where the checkpoint names no limit
_MEDIA_SHARE = 8  # one part in so many of what rows may take is at most kept of encoded images
_PICTURES_SHARE = 64  # of all memory, for tensors of pictures shown lately, and for their pixels
_MAX_PICTURES_BYTES = 512 << 20
Deliver = Callable[[list[SequenceUpdate]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What was found out while loading."""

    info: ModelInfo
    memory: MemoryBudget
    footprint: RowFootprint
    calibration: Calibration
    resume_rule: ResumeRule | None = None  # None: state cannot be copied


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, facts: EngineFacts):
        self.facts = facts
        self._scheduler = scheduler
        self._runner = runner
        self._aborts: list[int] = []  # for the next step, inside its fence: an abort keeps what was computed
        self.num_steps = 0

    @classmethod
    def load(cls, config: EngineConfig, checkpoint: Checkpoint, probe: VisionProbe | None = None) -> "Engine":
        """Load weights, measure, and size everything to the memory there is. Raises ConfigError.

        A model that takes images is tried with `probe`; without one, it takes none.
        """
        total = config.memory_budget_bytes or device_memory().default_budget_bytes
        if checkpoint.file_bytes > total:
            raise ConfigError(
                f"Too little memory: the weights of {config.model} take {checkpoint.file_bytes / 1e9:.1f} GB, "
                f"the budget is {total / 1e9:.1f} GB. Use a smaller or more strongly quantised model, or raise "
                "--memory-budget."
            )
        apply_limits(total)
        model = load_model(checkpoint, trust_remote_code=config.trust_remote_code, text_only=config.text_only)
        calibration = calibrate(model)
        images = None
        if probe is not None and isinstance(model, MultimodalModel):
            check_family(model, probe.prompt, probe.inputs)
            images = calibrate_images(model, probe.sizes, probe.max_image_tokens)
        tower_bytes = 0 if images is None else images.tower_bytes
        memory = MemoryBudget(
            total_bytes=total,
            weights_bytes=weights_bytes(model.module),
            transient_bytes=int(max(calibration.chunk_bytes_per_token * config.max_prefill_chunk, tower_bytes)),
            pictures_bytes=0 if images is None else min(_MAX_PICTURES_BYTES, total // _PICTURES_SHARE),
            decoded_bytes=0 if images is None else min(config.media.media_cache_bytes, total // _PICTURES_SHARE),
        )
        info = ModelInfo(
            model=config.model,
            architecture=checkpoint.architecture,
            max_model_len=_model_len(config, checkpoint, memory, model.footprint),
            weights_bytes=memory.weights_bytes,
            vocab_size=model.vocab_size,
            takes_images=images is not None,
            created=int(time.time()),
        )
        pacer = PrefillPacer(
            max_stall_s=config.max_stall_ms / 1000,
            max_chunk=config.max_prefill_chunk,
            tokens_per_s=calibration.tokens_per_s,
            overhead_s=calibration.overhead_s,
        )
        cache = _prefix_cache(config, checkpoint, model, memory, calibration)
        scheduler = make_scheduler(config, model, memory, pacer, cache, images)
        facts = EngineFacts(
            info=info, memory=memory, footprint=model.footprint, calibration=calibration, resume_rule=model.resume_rule
        )
        return cls(scheduler, Runner(model), facts)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._aborts)

    @property
    def num_rows(self) -> int:
        """Rows that hold state on the device."""
        return self._runner.num_rows

    @property
    def cache_tree(self) -> PrefixTree | None:
        """The prefix cache; None if it is off."""
        cache = self._scheduler.prefix_cache
        return None if cache is None else cache.tree

    def cache_entries(self) -> list[Entry]:
        return [] if self.cache_tree is None else list(self.cache_tree.entries())

    def clear_cache(self, salts: str = "") -> int:
        """Of prompts and replies whose salt begins so; without `salts`, of images too. Returns the bytes freed."""
        media = self._runner.media
        freed = 0 if media is None or salts else media.clear()
        return freed + (0 if self.cache_tree is None else self.cache_tree.clear(salts=salts))

    def live_bytes(self) -> int:
        return self._runner.live_bytes()

    def add(self, seq: Sequence) -> None:
        self._scheduler.add(seq)

    def abort(self, seq_id: int) -> None:
        """Takes effect at the start of the next step."""
        self._aborts.append(seq_id)

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """How much of a finished sequence a later turn can use."""
        self._scheduler.keep(seq, num_tokens)

    def report(self) -> EngineReport:
        """How things stand now."""
        cache = self._scheduler.prefix_cache
        return EngineReport(
            num_steps=self.num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            live_bytes=self._runner.live_bytes(),
            device=device_usage(),
            cache=None if cache is None else cache.tree.stats,
            num_skipped_captures=0 if cache is None else cache.num_skipped_captures,
            media=self._media_report(),
        )

    def _media_report(self) -> MediaReport | None:
        media = self._runner.media
        if media is None or not self.facts.info.takes_images:
            return None
        return MediaReport(
            num_images=len(media),
            num_encoded=media.num_encoded,
            longest_encode_s=media.longest_encode_s,
            num_evictions=media.num_evictions,
            used_bytes=media.used_bytes,
            max_bytes=media.max_bytes,
        )

    def step(self, deliver: Deliver) -> None:
        """One step. Tokens are delivered before the prefill that shares the step with them runs.

        Whatever goes wrong in a step as a whole fails the sequences under way, and the next step is well.
        """
        self.num_steps += 1
        plan = StepPlan()
        try:
            while self._aborts:
                self._scheduler.abort(self._aborts.pop())
            plan = self._scheduler.schedule(time.monotonic())
            if updates := self._scheduler.update(self._runner.decode(plan)):
                deliver(updates)
            if plan.prefill and (updates := self._scheduler.update(self._runner.prefill(plan.prefill))):
                deliver(updates)
        except Exception as error:
            logger.exception("An engine step failed")
            failure = GenerationError(f"The engine could not complete a step: {type(error).__name__}: {error}")
            self._runner.reset()
            for restore in plan.restores:
                restore.release()
            deliver([SequenceUpdate(seq_id=seq_id, error=failure) for seq_id in self._scheduler.abort_all()])


def make_scheduler(
    config: EngineConfig,
    model: Model,
    memory: MemoryBudget,
    pacer: PrefillPacer,
    cache: PrefixCache | None,
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
        whole_images=model.whole_images,
    )


def _prefix_cache(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    memory: MemoryBudget,
    calibration: Calibration,
) -> PrefixCache | None:
    if not config.prefix_cache:
        return None
    if model.resume_rule is None:
        logger.warning("The prefix cache is off: %s keeps state that cannot be copied", checkpoint.architecture)
        return None
    max_bytes = min(memory.rows_bytes, config.cache_memory_bytes or memory.rows_bytes)
    return PrefixCache(
        PrefixTree(max_bytes=max_bytes, s_per_token=1 / calibration.tokens_per_s),
        checkpoint.fingerprint(),
        model.resume_rule,
        model.footprint,
        max_bytes=max_bytes,
        snapshot_every=config.snapshot_every,
    )


def _model_len(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryBudget, footprint: RowFootprint) -> int:
    """The context window: the flag's or the checkpoint's, as far as memory holds one row of that length."""
    declared = checkpoint.max_model_len or _DEFAULT_MODEL_LEN
    wanted = config.max_model_len or declared
    if wanted > declared and checkpoint.max_model_len is not None:
        raise ConfigError(f"--max-model-len {wanted} exceeds the checkpoint's context of {declared} tokens.")
    fitting = footprint.max_tokens(memory.rows_bytes)
    if fitting >= wanted:
        return wanted
    if config.max_model_len is not None or fitting < 2:
        raise ConfigError(
            f"Too little memory for --max-model-len {wanted}: {fitting} tokens of context fit beside the weights. "
            "Lower it, use a smaller model, or raise --memory-budget."
        )
    logger.warning("Context limited to %d of %d tokens by the memory budget", fitting, declared)
    return fitting
