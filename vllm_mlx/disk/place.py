"""Which folder keeps the prefix cache on disk, and how much of the disk it may take. Knows no record."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .own_files import has_own_files, own_bytes

NAME = "vllm-mlx"
CAP_SHARE = 10  # by default, the cache takes at most a tenth of what it and free space take together
DAILY_SHARE = 5  # in a day, a fifth of the disk's size is written at most, so that it lasts for years
FLOOR_SHARE = 50  # a fiftieth of a disk stays free,
MAX_FLOOR_BYTES = 10_000_000_000  # and no more than this
_TAG = "CACHEDIR.TAG"  # backup programs leave a folder with this file out: https://bford.info/cachedir
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This folder holds the prefix cache of vllm-mlx. It may be deleted.\n"
)
_NO_INDEX = ".metadata_never_index"  # Spotlight leaves a folder with this file out
MARKS = frozenset({_TAG, _NO_INDEX})
_TMUTIL_S = 10.0


def folder_of(cache_dir: str | None) -> Path:
    """The folder that is set, or the default."""
    return default_folder() if cache_dir is None else Path(cache_dir).expanduser()


def default_folder(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """The user's folder for caches: on macOS, Time Machine leaves it out of backups."""
    if platform == "darwin":
        return Path("~/Library/Caches").expanduser() / NAME
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path("~/.cache").expanduser()) / NAME


def default_max_bytes(folder: Path) -> int:
    """A tenth of the space that is free or taken by the cache itself, so that the limit stays when it fills."""
    return (free_bytes(folder) + held_bytes(folder)) // CAP_SHARE


def default_daily_bytes(folder: Path) -> int:
    return shutil.disk_usage(nearest(folder)).total // DAILY_SHARE


def floor_bytes(folder: Path) -> int:
    """Free space that is left to others: the cache shrinks before less is free."""
    return min(MAX_FLOOR_BYTES, shutil.disk_usage(nearest(folder)).total // FLOOR_SHARE)


def free_bytes(folder: Path) -> int:
    """Free space of the disk that holds the folder, or will hold it. macOS can free more by deleting its own caches."""
    return shutil.disk_usage(nearest(folder)).free


def held_bytes(folder: Path) -> int:
    """Size of the cache's own files in the folder; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        return own_bytes(folder)
    return 0


def nothing_in(folder: Path) -> str | None:
    """Why the folder holds nothing of the cache; None if it does. It changes nothing. Raises OSError."""
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if _is_ours(folder) else f"{folder} is not a cache of vllm-mlx"


def trouble_with(folder: Path) -> str | None:
    """Why the folder cannot keep the cache; None if it can. It makes no folder, and leaves no file."""
    try:
        existing = nearest(folder)
        if not existing.is_dir():
            return f"{folder} is not a folder, or a file stands in its path"
        if existing == folder and not _is_ours(folder) and any(_strangers(folder)):
            return f"{folder} holds other files, and the cache needs a folder of its own, such as {folder / NAME}"
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".writable-"):
            pass
    except OSError as error:
        return f"{folder} is not writable: {error.strerror or error}"
    return None


def prepare(folder: Path) -> str | None:
    """Make the folder, and mark it for programs that copy or index files. Returns why it cannot be used, or None.

    A folder that holds files of others is not used: it would be left out of their backups and searches.
    """
    if (trouble := trouble_with(folder)) is not None:
        return trouble
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not (folder / _TAG).exists()
        (folder / _NO_INDEX).touch()
        (folder / _TAG).write_text(_TAG_TEXT, encoding="ascii")
    except FileExistsError:
        return f"{folder} is not a folder, or a file stands in its path"
    except OSError as error:
        return f"{folder} is not writable: {error.strerror or error}"
    if is_new and sys.platform == "darwin" and not folder.is_relative_to(Path("~/Library/Caches").expanduser()):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["/usr/bin/tmutil", "addexclusion", folder], capture_output=True, timeout=_TMUTIL_S)
    return None


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        if NAME in (folder / _TAG).read_text(encoding="ascii"):
            return True
    return has_own_files(folder)


def _strangers(folder: Path) -> Iterator[Path]:
    """What other programs and people keep in the folder; what the system keeps at the top of a disk is left out."""
    return (path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "lost+found")


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
