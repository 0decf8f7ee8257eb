"""Checkpoints in the folders of `models_from`: a list that follows the disk, and models of those that were asked for.

A model that was added stays, though its name goes with its files.
"""

import asyncio
import logging
from dataclasses import replace

from ..core.catalogue import Catalogue, Entry, Found
from ..core.config import EngineConfig
from ..core.errors import ConfigError, InvalidParameter, ModelLoadError, ModelUnavailable
from ..runner.checkpoint import read_checkpoint
from ..runner.places import folders_of, in_words, look
from .client import EngineClient
from .engine import LLMEngine
from .lane import ServedModel
from .loading import OpenDisk, Source, front_of, load, prepared
from .sizing import budget_of

logger = logging.getLogger(__name__)
_RETRY_S = 30.0


class FoundModels:
    """Belongs to one event loop."""

    def __init__(self, engine: EngineClient, models: Catalogue, config: EngineConfig, disk: OpenDisk | None):
        """List the checkpoints beside the models that are loaded. `config` and `disk` are those of the start."""
        self._engine, self._models, self._config, self._disk = engine, models, config, disk
        self._folders, self._turn = folders_of(models.places), asyncio.Lock()
        self._look()

    async def look(self) -> None:
        """List the checkpoints that are in the folders now."""
        async with self._turn:
            await asyncio.to_thread(self._look)

    async def need(self, name: str | None) -> None:
        """Make a model of the checkpoint that a request names. Raises RequestError if that cannot be served."""
        if (found := self._models.on_disk(name)) is None:
            return
        async with self._turn:
            if found.fault is None and found.position is None:
                await self._add(found)
        if found.fault is not None:
            message = f"The model `{found.name}` is not served. {found.fault}"
            if found.task == "not served":  # its files can be mended
                raise ModelUnavailable(message, retry_after_s=_RETRY_S)
            raise InvalidParameter(message, param="model")

    def _look(self) -> None:
        found, named = look(self._folders, self._models.found), self._models.named
        paths = {front.path.resolve(): at for at, front in enumerate(self._engine.fronts[: len(named)])}
        taken = [each.short for each in found] + [name for entry in named for name in entry.names]
        for each in found:
            each.position = paths.get(each.folder.resolve(), each.position)
            each.names = (each.short, each.name) if taken.count(each.short) == 1 else (each.name,)
        self._models.found = tuple(found)

    async def _add(self, found: Found) -> None:
        """Make a model, or note why that cannot be."""
        engine, models = self._engine, self._models
        try:
            source = await asyncio.to_thread(self._prepared, found)
            model = await engine.ask(lambda engine: _assembled(engine, source))
            front = await asyncio.to_thread(front_of, source, model, engine.parts)
        except (ConfigError, OSError) as error:
            logger.warning("%s cannot be served: %s", found.name, error)
            found.fault = in_words(error, found)
            if isinstance(error, ModelLoadError | OSError):
                found.task = "not served"
            else:
                most_bytes = budget_of(self._config).total_bytes
                fitting = [each for each in models.found if each.fault is None and each.file_bytes < most_bytes]
                largest = max(fitting, key=lambda each: each.file_bytes, default=None)
                found.fault += "" if largest is None else f" The largest that fits is {largest.names[0]}."
            return
        await engine.ask(lambda engine: self._take(engine, model))
        engine.add(front, model.residence)
        found.position = len(models.entries)
        models.entries += (Entry(config=source.config, name=source.name),)

    def _prepared(self, found: Found) -> Source:
        """Read what prepares prompts. Raises ConfigError and OSError."""
        config = self._models.config_of_found
        assert config is not None, "there are folders to look in"
        longest = config.max_model_len and min(config.max_model_len, found.max_model_len or config.max_model_len)
        own = self._config.with_model(replace(config, model=str(found.folder), max_model_len=longest))
        checkpoint = read_checkpoint(found.folder, inside=self._folders)
        return prepared(found.names[0], own, checkpoint, self._engine.memories.of(checkpoint.fingerprint()))

    def _take(self, engine: LLMEngine, model: ServedModel) -> None:
        """Add a model to the engine, on its thread. The first one brings the cache, which may be kept on disk."""
        model.residence.is_found = True
        engine.models = (*engine.models, model)
        engine.residency.models.append(model.residence)
        cache = model.scheduler.prefix_cache
        if self._disk is not None and cache is not None:
            tier = engine.disk or self._disk.start(cache.tree, {})
            engine.attach(tier, self._disk.report)
            if tier is not None:
                tier.add_model(cache.fingerprint, model.facts.info.model)
                tier.wake_with(self._engine.parts[0].wake)


def _assembled(engine: LLMEngine, source: Source) -> ServedModel:
    pinned_bytes = sum(model.residence.weights_bytes for model in engine.models if model.residence.is_pinned)
    return load(source, budget_of(source.config, pinned_bytes), engine.watch, engine.models, is_read=False)
