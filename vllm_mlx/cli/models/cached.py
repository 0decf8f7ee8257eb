"""What Hugging Face's cache on this machine holds of checkpoints. Reads folders; fetches nothing."""

from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError
from .describe import Description, describe


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    disk_bytes: int
    folder: Path
    description: Description | None  # None: nothing that can be served
    trouble: str = ""


def cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """By name. Empty where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        revisions = sorted(repo.revisions, key=lambda each: each.last_modified)
        if repo.repo_type == "model" and revisions:
            found.append(_cached(repo.repo_id, repo.size_on_disk, revisions[-1].snapshot_path))
    return sorted(found, key=lambda model: model.name.lower())


def local_folder(model: str) -> Path | None:
    """Where a model lies on this machine: the demo, a folder, or in the cache. None: it would be downloaded."""
    from ...demo import demo_path

    if model == "demo":
        return demo_path()
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    return next((cached.folder for cached in cached_models() if cached.name == model), None)


def _cached(name: str, disk_bytes: int, folder: Path) -> CachedModel:
    try:
        return CachedModel(name, disk_bytes, folder, describe(folder))
    except ConfigError as error:
        return CachedModel(name, disk_bytes, folder, None, error.message)
