"""The folder of the prefix cache on disk: where it lies, which files in it are the cache's, and how large it may be.

Files of other programs are neither counted nor touched, and links are not followed.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .database import NAME as DATABASE
from .database import files as database_files
from .faults import FULL

RECORDS = "records"
NAME = "vllm-mlx"
CAP_SHARE = 10  # by default, the cache takes at most a tenth of its own size and the free space together
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
_RECORD = re.compile(r"([0-9a-f]{16})\.kv")


def folder_of(cache_dir: str | None) -> Path:
    """Return the folder that is set, or the default."""
    return default_folder() if cache_dir is None else Path(cache_dir).expanduser()


def default_folder(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Return the user's folder for caches. On macOS, Time Machine leaves it out of backups."""
    if platform == "darwin":
        return Path("~/Library/Caches").expanduser() / NAME
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path("~/.cache").expanduser()) / NAME


def default_max_bytes(folder: Path) -> int:
    """Return a tenth of the space that is free or taken by the cache itself, so that the limit stays when it fills."""
    return (free_bytes(folder) + held_bytes(folder)) // CAP_SHARE


def default_daily_bytes(folder: Path) -> int:
    return shutil.disk_usage(nearest(folder)).total // DAILY_SHARE


def floor_bytes(folder: Path) -> int:
    """Return the free space that is left to other programs: the cache shrinks before less is free."""
    return min(MAX_FLOOR_BYTES, shutil.disk_usage(nearest(folder)).total // FLOOR_SHARE)


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds the folder, or will. macOS can free more by deleting its caches."""
    return shutil.disk_usage(nearest(folder)).free


def held_bytes(folder: Path) -> int:
    """Return the size of the cache's own files in the folder, or 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        sizes = (path.stat().st_size for path in database_files(folder / DATABASE) if path.exists())
        return sum(sizes) + sum(size for _, size in record_files(folder))
    return 0


def record_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of records. Raises OSError."""
    records = folder / RECORDS
    for path in records.iterdir() if records.is_dir() and not records.is_symlink() else ():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if _RECORD.fullmatch(path.name) and not stat.S_ISDIR(status.st_mode):
                yield path.stem, status.st_size if stat.S_ISREG(status.st_mode) else -1  # links do not count as records


def nothing_in(folder: Path) -> str | None:
    """Return the reason why the folder holds no cache, or None if it holds one, unchanged. Raises OSError."""
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if _is_ours(folder) else f"{folder} is not a cache of vllm-mlx"


def prepare(folder: Path, *, is_trial: bool = False) -> str | None:
    """Make the folder, and mark it for programs that copy or index files. Returns why it cannot be used, or None.

    A folder that holds files of others is not used: it would be left out of their backups and searches. A full disk
    may have room again later. A trial makes no folder, and leaves no file.
    """
    try:
        existing = nearest(folder)
        if existing == folder and not _is_ours(folder) and any(_strangers(folder)):
            return f"{folder} holds other files, and the cache needs a folder of its own, such as {folder / NAME}"
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".writable-"):
            pass
        if not is_trial:
            _make(folder)
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            return f"{folder} is not a folder, or a file stands in its path"
        return None if error.errno in FULL else f"{folder} is not writable: {error.strerror or error}"
    return None


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_new = not (folder / _TAG).exists()
    (folder / _NO_INDEX).touch()
    (folder / _TAG).write_text(_TAG_TEXT, encoding="ascii")
    if is_new and sys.platform == "darwin" and not folder.is_relative_to(Path("~/Library/Caches").expanduser()):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["/usr/bin/tmutil", "addexclusion", folder], capture_output=True, timeout=_TMUTIL_S)


def _is_ours(folder: Path) -> bool:
    tag = folder / _TAG
    return (tag.is_file() and NAME.encode() in tag.read_bytes()) or (folder / DATABASE).is_file()


def _strangers(folder: Path) -> Iterator[Path]:
    """Yield the entries of other programs and people in the folder, except those of the system at a disk's top."""
    return (path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "lost+found")


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
