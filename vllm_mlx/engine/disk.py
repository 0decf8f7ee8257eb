"""Opens the folder that keeps the prefix cache on disk, and puts the tier together for a loaded model."""

import logging
from dataclasses import dataclass, replace
from importlib.metadata import version

import mlx.core as mx

from ..cache.snapshot import STATE_VERSION
from ..cache.stats import DiskReport
from ..cache.tree import PrefixTree
from ..core.config import EngineConfig
from ..core.errors import setting
from ..disk.faults import FolderUnusable, NoRoom
from ..disk.folder import Folder
from ..disk.memories import NO_MEMORIES, Memories
from ..disk.place import default_daily_bytes, default_max_bytes, floor_bytes, folder_of, prepare
from ..disk.tier import DiskTier
from ..runner.checkpoint import Checkpoint
from ..runner.model import Model, MultimodalModel

logger = logging.getLogger(__name__)

_READ_BYTES_PER_S = 1e9  # what a disk reads, before any read was measured


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """The folder, which this process owns, and what reports say of it."""

    folder: Folder
    report: DiskReport

    def memories(self, fingerprint: str) -> Memories:
        """What else a restarted server needs for the same prompts, in the same folder."""
        return Memories.at(self.folder, fingerprint, cap_bytes=self.report.max_bytes)

    def start(self, memory: PrefixTree, model: Model, name: str, fingerprint: str, s_per_token: float) -> DiskTier:
        """Put the tier together, read the index, and note whose state is kept. Called on the engine thread."""
        rule = model.resume_rule
        assert rule is not None, "there is a prefix cache"
        self.folder.note_model(fingerprint, name)
        tier = DiskTier(
            self.folder,
            memory,
            fingerprint=fingerprint,
            rule=rule,
            s_per_token=s_per_token,
            read_bytes_per_s=_READ_BYTES_PER_S,
            report=self.report,
        )
        tier.load()
        return tier

    def close(self) -> None:
        """Free the folder if no tier was started, which closes it otherwise."""
        self.folder.close()


@dataclass(frozen=True, slots=True)
class NoDisk:
    """The folder cannot be used. The report says why."""

    report: DiskReport

    def memories(self, fingerprint: str) -> Memories:
        return NO_MEMORIES

    def start(self, *_: object) -> DiskReport:
        return self.report

    def close(self) -> None: ...


def open_disk(config: EngineConfig) -> OpenDisk | NoDisk | None:
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
    except (FolderUnusable, NoRoom) as error:
        return _no_disk(report, str(error))
    return OpenDisk(folder, replace(report, max_bytes=max_bytes, daily_bytes=daily_bytes))


def _no_disk(report: DiskReport, reason: str) -> NoDisk:
    logger.warning("Nothing is kept on disk: %s", reason)
    return NoDisk(replace(report, off_reason=reason))


def fingerprint(checkpoint: Checkpoint, model: Model) -> str:
    """What cached state depends on: the checkpoint, what runs it, on which device, and the versions of all that.

    A release of this server alone keeps the cache: `STATE_VERSION` is raised when the state itself changes.
    """
    kind, library = ("vision", "mlx-vlm") if isinstance(model, MultimodalModel) else ("text", "mlx-lm")
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    versions = f"{version('mlx')},{version(library)},{STATE_VERSION}".replace("-", "_")
    return f"{checkpoint.fingerprint()}-{kind}-{device}-{versions}"
