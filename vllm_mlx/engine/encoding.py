"""Assembles an encoder: a model that gives vectors or scores, and keeps no state of its inputs."""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx

from ..core.config import ModelInfo
from ..core.encoding import EncoderFacts
from ..core.memory import AttentionCost, Budget, MemoryBudget
from ..runner.attention import score_bytes
from ..runner.calibrate import Calibration, calibrate
from ..runner.device import DeviceWatch, cache_limit_bytes
from ..runner.encoder import EncoderModel, begin_loading_encoder
from ..runner.encoder_runner import EncoderRunner
from ..runner.loading import Loading
from ..runner.model import weight_arrays
from ..scheduler.encoder import NO_STATE, EncoderScheduler
from .lane import Assembly, Source
from .monitoring.schema import EngineFacts
from .sizing import assumed_calibration, pacer_of

logger = logging.getLogger(__name__)
_GENERATES_NOTHING = "it generates nothing"
_MASK_BYTES = 4  # of a pair of tokens, in the full mask that the library makes for each row


@dataclass(eq=False, kw_only=True)
class EncoderAssembly(Assembly):
    """Everything that an encoder needs to run, except its weights."""

    encoder: EncoderFacts
    budget: Budget
    watch: DeviceWatch

    def begin(self) -> Loading[EncoderModel]:
        self.source.checkpoint.check_unchanged(self.identity)
        return begin_loading_encoder(self.source.checkpoint, self.encoder)

    def run(self, model: EncoderModel) -> EncoderRunner:
        return EncoderRunner(model, self.watch)

    def measure(self, model: EncoderModel) -> Generator[None, None, Assembly]:
        yield
        return _assemble(self.source, self.encoder, self.budget, self.watch, model, calibrate(model))


def load_encoder(
    source: Source, encoder: EncoderFacts, budget: Budget, watch: DeviceWatch
) -> tuple[EncoderAssembly, EncoderModel]:
    """Read the weights and measure the model. Raises ConfigError."""
    budget.check_weights(source.config.model, source.checkpoint.file_bytes)
    source.stage.begin("reading weights", 0.0)
    started_s = time.monotonic()
    model = begin_loading_encoder(source.checkpoint, encoder).complete()
    assembly = _assemble(source, encoder, budget, watch, model, calibrate(model))
    assembly.load_s = time.monotonic() - started_s
    return assembly, model


def unread_encoder(source: Source, encoder: EncoderFacts, budget: Budget, watch: DeviceWatch) -> EncoderAssembly:
    """Assume the figures of a load. Raises ConfigError."""
    budget.check_weights(source.config.model, source.checkpoint.file_bytes)
    model = begin_loading_encoder(source.checkpoint, encoder).unread()
    assembly = _assemble(source, encoder, budget, watch, model, assumed_calibration(source.checkpoint))
    assembly.is_measured = False
    return assembly


def _assemble(
    source: Source,
    encoder: EncoderFacts,
    budget: Budget,
    watch: DeviceWatch,
    model: EncoderModel,
    calibration: Calibration,
) -> EncoderAssembly:
    config, sizes = source.config, [array.nbytes for array in weight_arrays(model.weights)]
    attention = _attention(encoder, budget, calibration)
    memory = MemoryBudget(
        total_bytes=budget.total_bytes,
        held_bytes=budget.held_bytes,
        weights_bytes=sum(sizes),
        transient_bytes=int(calibration.chunk_bytes_per_token * config.max_prefill_chunk) + attention.room_bytes,
    )
    longest, fitting = encoder.max_tokens, attention.longest_chunk(0)
    if fitting < longest:
        logger.warning("%s reads %d of %d tokens, as many as memory holds", config.model, fitting, longest)
    info = ModelInfo(
        model=config.model,
        architecture=source.checkpoint.architecture,
        max_model_len=min(longest, fitting),
        weights_bytes=memory.weights_bytes,
        vocab_size=model.vocab_size,
        created=int(time.time()),
        task=encoder.task,
    )
    watch.raise_cache_limit(cache_limit_bytes(budget.total_bytes, memory.transient_bytes))
    pacer = pacer_of(config, calibration, AttentionCost())
    return EncoderAssembly(
        source=source,
        scheduler=EncoderScheduler(config, memory=memory, pacer=pacer, attention=attention),
        facts=EngineFacts(
            info=info,
            memory=memory,
            footprint=NO_STATE,
            calibration=calibration,
            no_prefix_cache=_GENERATES_NOTHING,
            no_drafts=_GENERATES_NOTHING,
        ),
        identity=source.checkpoint.fingerprint(),
        room_bytes=max(sizes),
        encoder=encoder,
        budget=budget,
        watch=watch,
    )


def _attention(encoder: EncoderFacts, budget: Budget, calibration: Calibration) -> AttentionCost:
    """Return the memory of whole texts: the mask of each row, and its scores where the device keeps them."""
    pair_bytes = score_bytes(calibration.attention, on_metal=mx.metal.is_available()) + _MASK_BYTES
    return AttentionCost.within(
        budget.scores_bytes,
        bytes_per_pair=pair_bytes,
        max_chunk=encoder.max_tokens,
        max_tokens=encoder.max_tokens,
    )
