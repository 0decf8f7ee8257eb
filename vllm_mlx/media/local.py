"""Reads media files of this machine, from one folder only. Knows no image formats."""

import os
import stat
from pathlib import Path

from ..core.errors import ConfigError, InvalidImage, setting
from .sources import Kind, check_bytes

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block


class MediaRoot:
    """The folder whose files may be read; None for no file at all. Raises ConfigError if `root` is no folder."""

    def __init__(self, root: str | None):
        self._root = None
        if root is not None:
            folder = Path(root).expanduser()
            if not folder.is_dir():
                raise ConfigError(f"{setting('media_root')} {root} is not a folder.")
            self._root = folder.resolve()

    def read(self, path: str, max_bytes: int, kind: Kind = "image") -> bytes:
        """The bytes of a file. Links that lead out of the folder are refused. Raises InvalidImage."""
        if self._root is None:
            raise InvalidImage(
                f"this server reads no files. Send a data URL, or start it with {setting('media_root')} FOLDER."
            )
        try:
            relative = Path(path).resolve(strict=True).relative_to(self._root)
            with os.fdopen(_open(self._root, relative.parts), "rb") as file:
                check_bytes(os.fstat(file.fileno()).st_size, max_bytes, kind)
                data = file.read(max_bytes + 1)
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError
            raise InvalidImage(f"there is no such file that can be read under {setting('media_root')}.") from error
        check_bytes(len(data), max_bytes, kind)
        return data


def _open(root: Path, parts: tuple[str, ...]) -> int:
    """Open folder by folder and follow no link: one that was made after the path was resolved leads nowhere."""
    if not parts:
        raise IsADirectoryError(str(root))
    folder = os.open(root, _FLAGS | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            folder, parent = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=folder), folder
            os.close(parent)
        file = os.open(parts[-1], _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("not a regular file")
    return file
