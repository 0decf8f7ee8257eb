"""Records of one conversation as one file, a tar of plain records; and a check of all records of a folder."""

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .folder import Folder
from .own_files import SUFFIX
from .record import Damaged, OtherKey, Record, TensorData, UnknownVersion
from .record_file import Draft, Source, read_record, read_tensor, write_all

_MEMBER = re.compile(rf"([0-9a-f]{{40}})\{SUFFIX}")


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    num_bytes: int  # that were read
    fault: str | None  # None: every byte of it is as it was written; otherwise the file was removed


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


def export_path(folder: Folder, records: Iterable[Record], target: Path) -> int:
    """Write records, parents before children, to a new file that others may import. Returns its size.

    They are not encrypted there. A record whose parent is not among them, or that is damaged, raises an error, and so
    does a file that exists.
    """
    file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        names = {"": ""}
        for record in records:
            header = replace(record.header, parent=names[record.header.parent])
            draft = Draft(header, [_exported(folder, record, index) for index in range(len(record.tensors))])
            names[record.name] = draft.name
            member = tarfile.TarInfo(f"{draft.name}{SUFFIX}")
            member.size, member.mtime, member.mode = draft.file_bytes, int(record.used_s), 0o600
            write_all(file, member.tobuf(tarfile.PAX_FORMAT))
            draft.write(file)
            write_all(file, bytes(-draft.file_bytes % tarfile.BLOCKSIZE))
        write_all(file, bytes(2 * tarfile.BLOCKSIZE))
        return os.lseek(file, 0, os.SEEK_CUR)
    except BaseException:
        target.unlink()
        raise
    finally:
        os.close(file)


def check_export(source: Path) -> None:
    """Look at the names in a file, without its contents. Raises Damaged if it is no exported file, OSError."""
    for _ in _members(source):
        pass


def import_path(folder: Folder, source: Path, fingerprint: str | None = None) -> list[Record]:
    """Add the records of an exported file. Raises Damaged for other files, NoRoom, FolderUnusable, OSError.

    `fingerprint`: that of the checkpoint's files, where these were copied since the export. What runs them stays.
    What was added before an error stays: it is intact, and the next try finds it.
    """
    added: list[Record] = []
    names = {"": ""}
    with source.open("rb") as file:
        for member, name in _members(source):
            part = Source(file.fileno(), member.size, member.offset_data)
            try:
                record = read_record(part, name)
                if record.header.parent not in names:
                    raise Damaged("what it continues is missing")
                header = replace(record.header, parent=names[record.header.parent])
                if fingerprint is not None:
                    _, dash, library = header.fingerprint.partition("-")
                    header = replace(header, fingerprint=f"{fingerprint}{dash}{library}")
                added.append(
                    folder.add(header, [_imported(part, record, index) for index in range(len(record.tensors))])
                )
            except (Damaged, UnknownVersion, OtherKey) as error:
                raise Damaged(f"{source} cannot be imported: the record {name} is not intact ({error}).") from error
            names[name] = added[-1].name
    return added


def _members(source: Path) -> Iterator[tuple[tarfile.TarInfo, str]]:
    try:
        with tarfile.open(source, "r:") as archive:
            for member in archive:
                matched = _MEMBER.fullmatch(member.name)
                if not member.isreg() or matched is None:
                    raise Damaged(f"{source} cannot be imported: it holds {member.name!r}, which is no record.")
                yield member, matched[1]
    except tarfile.TarError as error:
        raise Damaged(f"{source} cannot be imported: it is no file that was exported ({error}).") from error


def _exported(folder: Folder, record: Record, index: int) -> TensorData:
    def data() -> Iterator[memoryview]:
        buffer = memoryview(bytearray(record.tensors[index].nbytes))
        folder.read_into(record, index, buffer)
        yield buffer

    tensor = record.tensors[index]
    return tensor.name, tensor.dtype, tensor.shape, data()


def _imported(part: Source, record: Record, index: int) -> TensorData:
    def data() -> Iterator[memoryview]:
        buffer = memoryview(bytearray(record.tensors[index].nbytes))
        read_tensor(part, record, index, buffer, None)
        yield buffer

    tensor = record.tensors[index]
    return tensor.name, tensor.dtype, tensor.shape, data()
