"""Assembles an encoder: a model that gives vectors or scores, and keeps no state of its inputs."""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import mlx.core as mx

from ..core.config import EngineConfig, ModelInfo
from ..core.encoding import EncoderFacts
from ..core.memory import AttentionCost, Budget, MemoryBudget
from ..runner.attention import assumed, score_bytes
from ..runner.calibrate import Calibration, calibrate
from ..runner.checkpoint import Checkpoint
from ..runner.device import DeviceWatch, cache_limit_bytes
from ..runner.encoder import EncoderModel, begin_loading_encoder
from ..runner.encoder_runner import EncoderRunner
from ..runner.loading import Loading
from ..runner.model import weight_arrays
from ..scheduler.encoder import NO_STATE, EncoderScheduler
from ..scheduler.prefill_pacer import PrefillPacer
from .lane import Assembly
from .monitoring.schema import EngineFacts
from .sizing import ASSUMED_TOKENS_PER_S, least_bytes_per_token

logger = logging.getLogger(__name__)
_GENERATES_NOTHING = "it generates nothing"
_MASK_BYTES = 4  # of a pair of tokens, in the full mask that the library makes for each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """An encoder's checkpoint and settings, from which its parts are assembled. `identity`: its fingerprint."""

    config: EngineConfig
    checkpoint: Checkpoint
    facts: EncoderFacts
    budget: Budget
    watch: DeviceWatch
    identity: str

    def begin(self) -> Loading[EncoderModel]:
        """Begin to load the weights. Raises ModelLoadError, also for a checkpoint that has changed on disk."""
        self.checkpoint.check_unchanged(self.identity)
        return begin_loading_encoder(self.checkpoint, self.facts)

    def run(self, model: EncoderModel) -> EncoderRunner:
        return EncoderRunner(model, self.watch)

    def measure(self, model: EncoderModel) -> Generator[None, None, Assembly]:
        """Measure the model at its first load. Raises ConfigError."""
        yield
        return self._assemble(model, calibrate(model))

    def load(self) -> tuple[EncoderModel, Assembly]:
        """Read the weights and measure the model. Raises ConfigError."""
        self.budget.check_weights(self.config.model, self.checkpoint.file_bytes)
        started_s = time.monotonic()
        model = self.begin().complete()
        return model, self._assemble(model, calibrate(model), time.monotonic() - started_s)

    def unread(self) -> Assembly:
        """Assume the figures that a load will measure. Raises ConfigError."""
        self.budget.check_weights(self.config.model, self.checkpoint.file_bytes)
        calibration = Calibration(
            tokens_per_s=ASSUMED_TOKENS_PER_S,
            overhead_s=0.0,
            chunk_bytes_per_token=least_bytes_per_token(self.checkpoint),
            attention=assumed(self.checkpoint.config),
        )
        return replace(self._assemble(self.begin().unread(), calibration), measure=self.measure)

    def _assemble(self, model: EncoderModel, calibration: Calibration, load_s: float = 0.0) -> Assembly:
        config, budget, sizes = self.config, self.budget, [array.nbytes for array in weight_arrays(model.weights)]
        attention = self._attention(calibration)
        memory = MemoryBudget(
            total_bytes=budget.total_bytes,
            held_bytes=budget.held_bytes,
            weights_bytes=sum(sizes),
            transient_bytes=int(calibration.chunk_bytes_per_token * config.max_prefill_chunk) + attention.room_bytes,
        )
        pacer = PrefillPacer(
            max_stall_s=None if config.max_stall_ms is None else config.max_stall_ms / 1000,
            max_chunk=config.max_prefill_chunk,
            tokens_per_s=calibration.tokens_per_s,
            overhead_s=calibration.overhead_s,
        )
        longest, fitting = self.facts.max_tokens, attention.longest_chunk(0)
        if fitting < longest:
            logger.warning("%s reads %d of %d tokens, as many as memory holds", config.model, fitting, longest)
        info = ModelInfo(
            model=config.model,
            architecture=self.checkpoint.architecture,
            max_model_len=min(longest, fitting),
            weights_bytes=memory.weights_bytes,
            vocab_size=model.vocab_size,
            created=int(time.time()),
            task=self.facts.task,
        )
        self.watch.raise_cache_limit(cache_limit_bytes(budget.total_bytes, memory.transient_bytes))
        return Assembly(
            scheduler=EncoderScheduler(config, memory=memory, pacer=pacer, attention=attention),
            facts=EngineFacts(
                info=info,
                memory=memory,
                footprint=NO_STATE,
                calibration=calibration,
                no_prefix_cache=_GENERATES_NOTHING,
                no_drafts=_GENERATES_NOTHING,
            ),
            begin=self.begin,
            run=self.run,
            weights_bytes=memory.weights_bytes,
            room_bytes=max(sizes),
            load_s=load_s,
        )

    def _attention(self, calibration: Calibration) -> AttentionCost:
        """Return the memory of whole texts: the mask of each row, and its scores where the device keeps them."""
        pair_bytes = score_bytes(calibration.attention, on_metal=mx.metal.is_available()) + _MASK_BYTES
        return AttentionCost.within(
            self.budget.scores_bytes,
            bytes_per_pair=pair_bytes,
            max_chunk=self.facts.max_tokens,
            max_tokens=self.facts.max_tokens,
        )
