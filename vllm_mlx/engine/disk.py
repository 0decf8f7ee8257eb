"""Opens the folder that keeps the prefix cache on disk, and puts the tier together for a loaded model."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version

import mlx.core as mx

from ..cache.snapshot import STATE_VERSION
from ..cache.stats import DiskReport
from ..cache.tree import PrefixTree
from ..core.config import EngineConfig
from ..core.errors import setting
from ..disk.faults import FolderUnusable
from ..disk.folder import Folder
from ..disk.kept import NO_MEMORIES, Memories
from ..disk.place import default_daily_bytes, default_max_bytes, floor_bytes, folder_of, prepare
from ..disk.tier import DiskTier
from ..runner.checkpoint import Checkpoint
from ..runner.model import Model, MultimodalModel

logger = logging.getLogger(__name__)
_SEVERAL_MACS = "each of several Macs holds a part of it, in memory only"  # journals of replies are kept


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """The folder, which this process owns, and what reports say of it: without a folder, why there is none."""

    report: DiskReport
    folder: Folder | None = None

    def memories(self, fingerprint: str) -> Memories:
        """Return what else a restarted server needs for the same prompts, from the same folder."""
        if self.folder is None:
            return NO_MEMORIES
        return Memories.at(self.folder, fingerprint, cap_bytes=self.report.max_bytes)

    def start(self, memory: PrefixTree, names: Mapping[str, str]) -> DiskTier | None:
        """Put the tier together, on the engine thread. `names` are those of the tree's models, by fingerprint."""
        if self.folder is None:
            return None
        tier = DiskTier(self.folder, memory, report=self.report)
        for fingerprint, name in names.items():
            tier.add_model(fingerprint, name)
        tier.tick(is_idle=True)  # it reads the index, so that the first request finds what there is
        return tier

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
    """Name what cached state depends on: the checkpoint, its head, the library that runs it, the device, the versions.

    A release of this server alone keeps the cache: `STATE_VERSION` is raised when the state itself changes.
    """
    kind, library = ("vision", "mlx-vlm") if isinstance(model, MultimodalModel) else ("text", "mlx-lm")
    if model.num_head_layers:  # the head's state is a part of a row's
        kind += f"_mtp{model.head_digest[:16]}"
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    versions = f"{version('mlx')},{version(library)},{STATE_VERSION}".replace("-", "_")
    return f"{checkpoint.fingerprint()}-{kind}-{device}-{versions}"
