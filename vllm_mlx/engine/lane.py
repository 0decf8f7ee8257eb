"""One checkpoint on the engine thread: the parts that outlive its weights, and the lane that needs the weights.

Scheduler, prefix cache and everything that prepares prompts stay when the weights leave, so that a request waits in the
queue as it would for a place. Weights come back in slices between steps. The first load also measures the model;
before it, sizes are assumed from the headers of the files, and sequences are held back.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import mlx.core as mx

from ..cache.media import MediaCache
from ..core.config import EngineConfig
from ..core.encoding import EncoderFacts
from ..core.errors import ContextLengthExceeded, ModelLoadError, first_line
from ..core.memory import readable
from ..core.stage import UNSEEN, LoadStage
from ..disk.kept import NO_MEMORIES, Memories
from ..formats.tokenizer import Tokenizer
from ..media.vision import VisionProcessor
from ..prompt.reply_formats import CheckpointFormats
from ..runner.checkpoint import Checkpoint
from ..runner.encoder import EncoderModel
from ..runner.encoder_runner import EncoderRunner
from ..runner.loading import Loading
from ..runner.model import Model
from ..runner.runner import Runner
from ..scheduler.lane_turns import LaneTurns
from ..scheduler.residence import Action, Reason, Resident
from ..scheduler.scheduler import Scheduler
from .front import Front
from .monitoring.schema import EngineFacts, LaneReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
_CHUNK_SHARE = 0.75  # of a stall budget
_MUCH_MISSING = 1 << 20  # bytes that do not come back before the log says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model before its weights are loaded."""

    name: str  # in messages
    config: EngineConfig
    checkpoint: Checkpoint
    memories: Memories = NO_MEMORIES
    tokenizer: Tokenizer | None = None  # None where no prompt is prepared, like the next ones
    formats: CheckpointFormats | None = None
    vision: VisionProcessor | None = None
    encoder: EncoderFacts | None = None  # None for a model that generates
    pin: bool = False  # its weights leave for no other model
    stage: LoadStage = UNSEEN  # told what is done during the start


@dataclass(eq=False, kw_only=True)
class Assembly(ABC):
    """Everything that a model needs to run, except its weights."""

    source: Source
    scheduler: Scheduler
    facts: EngineFacts
    identity: str  # of the files of the checkpoint
    room_bytes: int  # for what is in memory in addition to the weights while they are read
    load_s: float = 0.0  # of the first load
    is_measured: bool = True  # otherwise sizes are assumed until the first load

    @abstractmethod
    def begin(self) -> Loading[Any]:
        """Begin to load the weights. Raises ModelLoadError, also for a checkpoint that has changed on disk."""

    @abstractmethod
    def run(self, model: Any) -> Runner | EncoderRunner:
        """Return the runner of the model that was loaded."""

    @abstractmethod
    def measure(self, model: Any) -> "Generator[None, None, Assembly]":
        """Measure the model at its first load in parts, between which other models run. Raises ConfigError."""


class Lane:
    """Runs the steps of a model whose weights are in memory. Belongs to the engine thread."""

    def __init__(self, model: Resident, runner: Runner | EncoderRunner):
        self.model, self.scheduler, self.runner = model, model.scheduler, runner
        self.is_stalled = False  # whether its rows wait for images, or for state that is read from disk
        self.decoded_s = 0.0  # when its replies got their last tokens, by the engine's clock

    def slack_s(self, now: float) -> float:
        """Return the seconds that its replies can wait for the next step; infinite if none decodes."""
        prefill = self.scheduler.prefill
        return prefill.stall_s - prefill.decode_s - (now - self.decoded_s) if prefill.is_decoding else math.inf

    @property
    def wanted_s(self) -> float:
        """Return the slack that other lanes should have for its next step. A chunk is worth most of a stall budget.

        A unit of an encoder is worth all of it, so that replies decode between two units.
        """
        prefill, share = self.scheduler.prefill, 1.0 if isinstance(self.runner, EncoderRunner) else _CHUNK_SHARE
        return prefill.decode_s + (share * prefill.stall_s if prefill.is_prefilling else 0.0)

    def pace(self, slack_s: float | None) -> None:
        """Bound the chunks of the next step by the slack of other busy lanes. With None, nothing else is busy."""
        prefill = self.scheduler.prefill
        prefill.beside_s = math.inf if slack_s is None else max(0.0, min(prefill.stall_s, slack_s - prefill.decode_s))


class LaneChoice:
    """Chooses the lane that runs the next step. Lanes are named by the positions of their models."""

    def __init__(self, num_lanes: int):
        self.turns = LaneTurns(num_lanes)
        self._num_urgent = 0  # steps in a row for lanes whose replies could wait no longer

    def next(self, lanes: Mapping[int, Lane], now: float) -> int:
        """Return the lane that was served least; or one whose replies can wait no longer, which decodes only."""
        at, slack_s = self.turns.next(lanes.keys()), None
        others = lanes.keys() - {at}
        if others and lanes[at].model.is_outgrown:  # the last rows give memory back before another step takes it
            running = (each for each, lane in lanes.items() if lane.scheduler.num_running)
            at, slack_s = max(running, key=lambda each: lanes[each].scheduler.room.first_id), 0.0
        elif others:
            urgent = min(sorted(others), key=lambda other: lanes[other].slack_s(now))
            slack_s = lanes[urgent].slack_s(now)
            self._num_urgent += 1
            if slack_s < lanes[at].wanted_s and self._num_urgent <= len(others):
                at, slack_s = urgent, 0.0
            else:
                self._num_urgent = 0
        lanes[at].pace(slack_s)
        return at


class ServedModel(Resident):
    """A model of the server. It does what `Residency` decides about its weights. Belongs to the engine thread."""

    def __init__(self, assembly: Assembly):
        source = assembly.source
        super().__init__(
            name=source.name,
            scheduler=assembly.scheduler,
            memory=assembly.facts.memory,
            room_bytes=assembly.room_bytes,
            expected_load_s=assembly.load_s,
            is_measured=assembly.is_measured,
            is_pinned=source.pin,
            no_unload=source.config.no_unload,
            idle_unload_s=source.config.idle_unload_s,
        )
        self.assembly = assembly
        self.lane: Lane | None = None
        self.media: MediaCache[Any] | None = None  # features of images; None for a model that takes none
        self.front: Front | None = None  # it is told what the first load has measured
        self._loading: Loading[Any] | None = None
        self._parts: Iterator[None] = iter(())  # of the load
        self.build_s = 0.0  # of the last load: the pause in which the model is built
        self._missing_bytes = 0

    def start(self, model: Model | EncoderModel) -> None:
        """Take over the weights that the start of the server has read."""
        self.state, self.loads["start"] = "ready", 1
        self._serve(model)

    @property
    def facts(self) -> EngineFacts:
        return self.assembly.facts

    @property
    def has_work(self) -> bool:
        """Return whether a step can do anything before the next message."""
        if self.lane is None or (self.is_short and not self.scheduler.num_running):
            cache = self.scheduler.prefix_cache
            return cache is not None and cache.has_trims  # removing cached state needs no model
        return self.scheduler.has_work and not self.lane.is_stalled

    def wake(self) -> None:
        """Let the next step of its lane run, though rows have waited for something."""
        if self.lane is not None:
            self.lane.is_stalled = False

    def clear(self, salts: str) -> int:
        """Forget state of salts that begin with `salts`. Returns the bytes of image features freed."""
        self.scheduler.ahead.clear(salts)
        return 0 if self.media is None else self.media.clear(salts)

    def report(self, now: float) -> LaneReport:
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        return LaneReport(
            row={
                "pinned": self.is_pinned,
                "state": self.state,
                "progress": None if self._loading is None else round(self._loading.progress, 4),
                "weights_bytes": self.taken_bytes,
                "missing_bytes": self._missing_bytes,
                "last_used_s": round(now - self.used_s, 1),
                "running": scheduler.num_replies,
                "waiting": sum(not seq.is_ahead for seq in self.waiting),
                "loads": {reason: self.loads[reason] for reason in get_args(Reason)},
                "load_s": round(self.load_s, 3),
                "cause": self.cause,
                "ahead_tokens": {**scheduler.ahead.tokens},
            },
            num_preemptions=scheduler.num_preemptions,
            num_restarts=scheduler.num_restarts,
            live_bytes=0 if self.lane is None else self.lane.runner.live_bytes(),
            lacking_bytes=scheduler.pool.planned_bytes - scheduler.pool.num_bytes,
            num_shortened=scheduler.pool.num_shortened,
            num_skipped_captures=0 if cache is None else cache.num_skipped_captures,
            images=image_status(self.media),
            drafts=draft_status(self.facts.no_drafts, scheduler.speculation),
            media_bytes=0 if self.media is None else self.media.used_bytes,
            build_s=self.build_s,
        )

    def cut_waiting(self) -> Iterator[tuple[int, ContextLengthExceeded]]:
        """Cut replies to the context, which the first load may have found shorter. Yield prompts that are too long."""
        limit = self.facts.info.max_model_len
        for seq in self.scheduler.waiting:
            if seq.prompt.texts is not None:  # each of the texts has room, or runs alone
                continue
            if seq.num_prompt_tokens >= limit:
                error = ContextLengthExceeded(num_prompt_tokens=seq.num_prompt_tokens, max_model_len=limit)
                yield seq.seq_id, error
            seq.max_tokens = min(seq.max_tokens, max(1, limit - seq.num_prompt_tokens))

    # -- actions of `Residency`

    def act(self, action: Action | None) -> None:
        """Carry out an action. Raises ModelLoadError if a load cannot begin."""
        match action:
            case "begin":
                self._drop()
                self.scheduler.room.shrink_cache()
                self._loading = self.assembly.begin()
                self._parts = self._load(self._loading)
            case "give up":
                self._drop()
            case "free":
                self._free()

    def _drop(self) -> None:
        """Free the weights that a load has read."""
        self._loading, self._parts = None, iter(())
        mx.clear_cache()

    def advance(self) -> bool:
        """Read the next slice, or measure a part. Returns whether the lane is ready. Raises ConfigError."""
        return next(self._parts, self) is self

    def _load(self, loading: Loading[Any]) -> Iterator[None]:
        while (model := loading.advance()) is None:
            yield
        if not self.is_measured:
            yield
            try:
                self._take_over((yield from self.assembly.measure(model)))
            except RuntimeError as error:
                raise ModelLoadError(f"{self.name} could not be measured: {first_line(error)}") from error
        self._serve(model)
        self._loading, self.build_s = None, loading.build_s
        mx.clear_cache()

    def _take_over(self, assembly: Assembly) -> None:
        """Replace assumed sizes by the measurements of the first load."""
        before, after = self.scheduler.prefix_cache, assembly.scheduler.prefix_cache
        if before is not None and after is not None and after.fingerprint == before.fingerprint:
            after.disk = before.disk
        self.assembly = assembly
        self.scheduler, self.memory, self.is_measured = assembly.scheduler, assembly.facts.memory, True
        if self.front is not None:
            self.front.measured(assembly.facts)

    def _serve(self, model: Model | EncoderModel) -> None:
        self.lane = Lane(self, self.assembly.run(model))
        self.media = self.lane.runner.media if self.facts.info.takes_images else None

    def _free(self) -> None:
        """Free the weights, and compare the bytes that MLX counts with the expected ones. The tree stays."""
        assert self.lane is not None and not self.lane.runner.num_rows, "no row needs the weights"
        expected_bytes = self.memory.weights_bytes + self.scheduler.room.image_bytes
        before = mx.get_active_memory()
        self.lane.runner.reset()
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.forget_planned()
        self.lane = None
        if self.media is not None:
            self.media.clear()
        mx.clear_cache()
        freed_bytes = before - mx.get_active_memory()
        self._missing_bytes = max(0, expected_bytes - freed_bytes)
        logger.info("%s is unloaded: %s are free again", self.name, readable(freed_bytes))
        if self._missing_bytes > _MUCH_MISSING:
            logger.warning("%s of the weights of %s are still in memory", readable(self._missing_bytes), self.name)
