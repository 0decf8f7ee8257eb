"""The files of a checkpoint's weights: their names, their headers, and their index. It knows no mlx."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..core.errors import ModelLoadError
from ..formats.tokenizer import read_json

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_POINTER, _MAX_POINTER_BYTES = b"version https://git-lfs", 1024  # as the specification of Git LFS has them
_AGAIN = "Download this file again."


def files_of(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match, by name, without those with a dot first, which macOS writes for other files."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def weight_files(folder: Path) -> list[Path]:
    """Return all files of weights that a library may load, without the copy that is `consolidated.safetensors`."""
    return [file for file in files_of(folder, "*.safetensors") if file.name != "consolidated.safetensors"]


def model_files(folder: Path) -> list[Path]:
    """Return the weights of the model itself, in one file or in several."""
    return [file for file in weight_files(folder) if file.name.startswith("model")]


def check_downloaded(files: Iterable[Path]) -> None:
    """Raise ModelLoadError for an entry of a folder that only stands for a file. Raises OSError."""
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file} is not a file, or a link to a file that is not there. {_AGAIN}")
        if file.stat().st_size < _MAX_POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise ModelLoadError(
                f"{file} is a Git LFS pointer, without the content. Download it, for example with `git lfs pull`."
            )


def read_header(file: Path) -> bytes:
    """Return the header of a safetensors file: JSON that lists tensors by name. Raises ModelLoadError and OSError."""
    with file.open("rb") as stream:
        num_bytes, rest = int.from_bytes(stream.read(8), "little"), file.stat().st_size - 8
        if rest == -8:
            raise ModelLoadError(f"{file} is empty. {_AGAIN}")
        if not 2 <= num_bytes <= min(rest, _MAX_HEADER_BYTES):
            raise ModelLoadError(f"{file} is not a safetensors file, or is cut short. {_AGAIN}")
        return stream.read(num_bytes)


def tensors_of(file: Path) -> Mapping[str, Any]:
    """Return a safetensors file's description of its tensors, by name. Raises ModelLoadError and OSError."""
    header = read_header(file)
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        is_cut = 8 + len(header) + end > file.stat().st_size
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file} has a damaged header. {_AGAIN}") from error
    if is_cut:
        raise ModelLoadError(f"{file} is cut short. {_AGAIN}")
    return tensors


def index_fault(folder: Path) -> str | None:
    """Describe a fault of the index. Returns None if it fits the files, or if there is no index."""
    try:
        index = read_json(folder / INDEX)
        places = index.get("weight_map", {})
        if any("/" in name for name in places.values()):
            return f"{INDEX} names files of other folders"
        if missing := [name for name in sorted(set(places.values())) if not (folder / name).is_file()]:
            return f"{INDEX} names {missing[0]}, which is not there"
        if places.keys() - {tensor for name in set(places.values()) for tensor in tensors_of(folder / name)}:
            return f"{INDEX} names tensors that are not in its files"
    except (ModelLoadError, OSError, TypeError, AttributeError):
        return f"{INDEX} is damaged"
    return None


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """Give a folder whose files mlx-vlm all reads: this one, or links to its files without an index that is wrong."""
    if index_fault(folder) is None:
        yield folder
        return
    with TemporaryDirectory(prefix="vllm-mlx-") as name:
        for file in files_of(folder, "*"):
            if file.name != INDEX:
                (Path(name) / file.name).symlink_to(file.absolute())
        yield Path(name)
