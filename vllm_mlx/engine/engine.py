"""schedule → decode → prefill → update, one step at a time, on the one thread that owns MLX."""

import time
from collections.abc import Callable

from ..cache.stats import Entry
from ..cache.tree import PrefixTree
from ..core.config import EngineConfig
from ..core.errors import GenerationError
from ..core.fence import Fence
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate, StepPlan
from ..media.vision import VisionProbe
from ..runner.checkpoint import Checkpoint
from ..runner.device import DeviceWatch, device_memory
from ..runner.runner import Runner
from ..scheduler.scheduler import Scheduler
from .loading import (
    MeasuredModel,
    engine_facts,
    load_measured,
    make_pacer,
    make_prefix_cache,
    make_scheduler,
)
from .monitoring.facts import EngineFacts
from .monitoring.report import EngineReport, MediaReport

Deliver = Callable[[list[SequenceUpdate]], None]


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, watch: DeviceWatch, facts: EngineFacts):
        self.facts = facts
        self._scheduler = scheduler
        self._runner = runner
        self._watch = watch
        self._aborts: list[int] = []  # handled in the next step, inside its fence, because an abort captures state
        self._is_stalled = False
        self.num_steps = 0

    @classmethod
    def load(cls, config: EngineConfig, checkpoint: Checkpoint, probe: VisionProbe | None = None) -> "Engine":
        """Load weights, measure, and size everything to the available memory. Raises ConfigError.

        A model that takes images is tested with `probe`. Without a probe it takes no images.
        """
        return cls.around(config, checkpoint, load_measured(config, checkpoint, probe))

    @classmethod
    def around(cls, config: EngineConfig, checkpoint: Checkpoint, measured: MeasuredModel) -> "Engine":
        """Make an engine for a model that is loaded and measured already. Raises ConfigError."""
        facts = engine_facts(config, checkpoint, measured)
        pacer = make_pacer(config, measured.calibration)
        cache = make_prefix_cache(config, checkpoint, measured, facts.memory)
        scheduler = make_scheduler(config, measured.model, facts.memory, pacer, cache, measured.images)
        watch = DeviceWatch(device_memory().limit_bytes(facts.memory.total_bytes))
        return cls(scheduler, Runner(measured.model, watch), watch, facts)

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything before the next message."""
        return bool(self._aborts) or (self._scheduler.has_work and not self._is_stalled)

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
        """Remove cached state and image features of salts that begin with `salts`. Returns the bytes freed."""
        media = self._runner.media
        freed = 0 if media is None else media.clear(salts)
        return freed + (0 if self.cache_tree is None else self.cache_tree.clear(salts=salts))

    def live_bytes(self) -> int:
        return self._runner.live_bytes()

    def wake(self) -> None:
        """Step again: images for which rows wait are ready."""
        self._is_stalled = False

    def add(self, seq: Sequence) -> None:
        self._is_stalled = False
        self._scheduler.add(seq)

    def abort(self, seq_id: int) -> None:
        """End a sequence at the start of the next step."""
        self._aborts.append(seq_id)

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence that has ended or is about to end."""
        self._is_stalled = False
        self._scheduler.keep(seq, num_tokens)

    def report(self) -> EngineReport:
        """Describe the present state."""
        cache = self._scheduler.prefix_cache
        return EngineReport(
            num_steps=self.num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_restarts=self._scheduler.num_restarts,
            live_bytes=self._runner.live_bytes(),
            pool_bytes=self._scheduler.pool.num_bytes,
            num_shortened=self._scheduler.pool.num_shortened,
            device=self._watch.usage(),
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

    def rest(self) -> None:
        """Give back what only a next step would use. Called when no step is due."""
        self._runner.rest()

    def step(self, deliver: Deliver) -> None:
        """Run one step. Tokens are delivered before the prefill of the same step runs.

        If a step fails as a whole, its sequences restart or fail; the next step starts clean.
        """
        self.num_steps += 1
        self._is_stalled = False
        plan = StepPlan()
        with Fence("the engine, which continues with its next step") as fence:
            while self._aborts:
                self._scheduler.abort(self._aborts.pop())
            plan = self._scheduler.schedule(time.monotonic())
            if updates := self._scheduler.update(self._runner.decode(plan)):
                deliver(updates)
            self._is_stalled = plan == StepPlan() and not updates and self._scheduler.awaits_inputs
            if plan.prefill and (updates := self._scheduler.update(self._runner.prefill(plan.prefill))):
                deliver(updates)
        if (error := fence.error) is not None:
            failure = GenerationError(f"The engine could not complete a step: {type(error).__name__}: {error}")
            self._runner.reset()
            deliver(self._scheduler.recover(failure))
