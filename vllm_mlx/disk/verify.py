"""A check of every byte of a folder's records."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .folder import Folder
from .record import Damaged


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    num_bytes: int  # that were read
    fault: str | None  # why the file was removed, or None if every byte of it is as it was written


def verify(folder: Folder) -> Iterator[Finding]:
    """Read every byte of every record. Raises FolderUnusable."""
    num_seen = len(folder.damages)
    for record in folder.scan():
        path = folder.path_of(record)
        try:
            for index, tensor in enumerate(record.tensors):
                folder.read_into(record, index, memoryview(bytearray(tensor.nbytes)))
        except Damaged:
            continue  # It is one of the damages below.
        except FileNotFoundError:
            continue
        yield Finding(path, record.file_bytes, None)
    for damage in folder.damages[num_seen:]:
        yield Finding(damage.path, 0, damage.reason)
