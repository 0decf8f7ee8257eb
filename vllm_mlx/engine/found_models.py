"""Checkpoints in the folders of `models_from`: a list that follows the disk, and models of those that are asked for."""

import asyncio
import logging
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..core.catalogue import Catalogue, Entry, Found, ModelTask
from ..core.config import EngineConfig
from ..core.errors import ConfigError, InvalidParameter, ModelBusy, ModelLoadError, ModelUnavailable, setting
from ..formats.tokenizer import read_json
from ..runner.checkpoint import HUB, Checkpoint, check_links, checkpoints, folders_of, read_checkpoint
from ..runner.encoder_checkpoint import read_encoder
from .client import EngineClient
from .engine import LLMEngine
from .lane import ServedModel, Source
from .loading import OpenDisk, front_of, load, prepared
from .sizing import budget_of

logger = logging.getLogger(__name__)
_RETRY_S = 30.0
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")


class FoundModels:
    def __init__(self, engine: EngineClient, models: Catalogue, config: EngineConfig, disk: OpenDisk | None):
        """List the checkpoints in addition to the loaded models. `config` and `disk` are those of the start."""
        self._engine, self._models, self._config, self._disk = engine, models, config, disk
        pinned = (front.info.weights_bytes for front, one in zip(engine.fronts, models.entries, strict=True) if one.pin)
        self._budget, self._folders = budget_of(config, sum(pinned)), folders_of(models.places)
        for place in models.places:
            if place != HUB and not Path(place).expanduser().is_dir():
                message = "%s %s: there is no such folder now. Its models are served once it comes."
                logger.warning(message, setting("models_from"), place)
        self._known: dict[tuple[Path, object], Found] = {}  # by folder, and by names, times and sizes of its files
        self._looking, self._adding = asyncio.Lock(), asyncio.Lock()
        self._look()

    async def look(self) -> None:
        async with self._looking:
            await asyncio.to_thread(self._look)

    async def need(self, name: str | None) -> None:
        """Make a model of the checkpoint that a request names. Raises RequestError if that cannot be served."""
        if (found := self._models.on_disk(name)) is not None and self._may_be_stale(found):
            await self.look()
            found = self._models.on_disk(name)
        if found is None or found.position is not None:
            return
        async with self._adding:
            if found.fault is None and found.position is None:
                await self._add(found)
        if found.fault is not None:
            if found.task != "not served":
                raise InvalidParameter(f"{found.name} is not served. {found.fault}", param="model")
            raise ModelUnavailable(f"{found.name} cannot be read. {found.fault}", retry_after_s=_RETRY_S)

    def _may_be_stale(self, found: Found) -> bool:
        """Return whether a request reads the files of a checkpoint that may have changed since the last look."""
        at = -1 if found.position is None else found.position
        is_out = at >= len(self._models.named) and self._engine.state_of(at) in ("unloaded", "failed")
        return is_out or found.fault is not None

    def _look(self) -> None:
        named = self._models.named
        found = [self._read(Found(name=name, folder=folder)) for name, folder in checkpoints(self._folders)]
        models = [entry.config.model for entry in named]
        own = {key: at for at, one in enumerate(models) for key in (one, str(Path(one).expanduser().resolve()))}
        shorts = [each.name.rpartition("/")[2] for each in found]
        taken = Counter([*shorts, *(each.name for each in found), *(name for one in named for name in one.names)])
        for each, short in zip(found, shorts, strict=True):
            if (at := own.get(each.name, own.get(str(each.folder)))) is not None:
                each.position = at
            each.names = tuple(name for name in (short, each.name) if taken[name] == 1)
        self._models.found = tuple(each for each in found if each.names)

    def _read(self, found: Found) -> Found:
        """Read the headers, or return the known description of files that have not changed."""
        folder = found.folder
        try:
            check_links(folder, self._folders)
            files = [each for each in (*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")) if each.is_file()]
            stats = sorted((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
            found.changed_ns = max((file.stat().st_ctime_ns for file in files), default=0)  # also by chmod
            same = self._known.get((folder, tuple(stats)))
            if same is not None and (same.fault is None or same.changed_ns == found.changed_ns):
                return same
            checkpoint = read_checkpoint(folder, inside=self._folders)
            found.file_bytes, found.max_model_len = checkpoint.file_bytes, checkpoint.max_model_len
            shards = [shard[1] for file in files if (shard := _SHARD.fullmatch(file.name)) is not None]
            if shards and len(shards) < int(shards[0]):
                raise ModelLoadError(f"{len(shards)} of its {int(shards[0])} files are here. Download the others.")
            found.task = _task(checkpoint)
            self._known[folder, tuple(stats)] = found
        except (ModelLoadError, OSError) as error:
            found.fault = _in_words(error, found)
        return found

    async def _add(self, found: Found) -> None:
        """Make a model, or note why that is impossible."""
        engine, models = self._engine, self._models
        try:
            source = await asyncio.to_thread(self._prepared, found)
            model = await engine.ask(lambda it: load(source, self._budget, it.watch, it.models, is_read=False))
            front = await asyncio.to_thread(front_of, source, model, engine.parts)
        except (ConfigError, OSError) as error:
            if not found.folder.is_dir():
                raise ModelUnavailable(f"{found.name} is no longer on disk.", retry_after_s=_RETRY_S) from error
            found.fault = _in_words(error, found)
            fits = [one for one in models.others if not one.fault and one.file_bytes < self._budget.free_bytes]
            if isinstance(error, ModelLoadError | OSError):
                found.task = "not served"
            elif fits:
                found.fault += f" The largest that fits is {max(fits, key=lambda one: one.file_bytes).names[0]}."
            return
        await engine.ask(lambda engine: self._take(engine, model))
        engine.add(front)
        found.position = len(models.entries)
        models.entries += (Entry(config=source.config, name=source.name),)
        for at, one in enumerate(models.entries[:-1]):
            if at >= len(models.named) and one.config.model == source.config.model:  # its files were replaced
                with suppress(ModelBusy):
                    await engine.unload_model(at, wait=False)

    def _prepared(self, found: Found) -> Source:
        config = self._models.config_of_found or EngineConfig(model="")
        longest = config.max_model_len and min(config.max_model_len, found.max_model_len or config.max_model_len)
        own = self._config.with_model(replace(config, model=str(found.folder), max_model_len=longest))
        checkpoint = read_checkpoint(found.folder, inside=self._folders)
        return prepared(found.names[0], own, checkpoint, self._engine.memories.of(checkpoint.fingerprint()))

    def _take(self, engine: LLMEngine, model: ServedModel) -> None:
        model.is_found = True
        engine.models.append(model)
        if self._disk is not None:
            self._disk.serve(engine)
        if engine.disk is not None:
            engine.disk.wake_with(self._engine.parts[0].wake)


def _in_words(error: Exception, found: Found) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error).replace(str(found.folder), found.name)


def _task(checkpoint: Checkpoint) -> ModelTask:
    config, at = checkpoint.config, checkpoint.path
    if (encoder := read_encoder(checkpoint, EngineConfig(model=""))) is not None:
        return encoder.task
    chats = (at / "chat_template.jinja").is_file() or "chat_template" in read_json(at / "tokenizer_config.json")
    sees = config.get("vision_config") and any("vis" in name for name in checkpoint.weight_names)
    return "completion" if not chats else "vision" if sees else "chat"
