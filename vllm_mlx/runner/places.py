"""Checkpoints in folders, listed by the headers of their files. Links are followed only inside these folders."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from huggingface_hub import constants

from ..core.catalogue import Found, ModelTask
from ..core.errors import ModelLoadError
from ..formats.tokenizer import read_json
from .checkpoint import LM_STUDIO, PICKLED, Checkpoint, check_links, read_checkpoint
from .weight_files import files_of, weight_files

HUB = "hub"  # names Hugging Face's cache and LM Studio's folders
_WEIGHTS = {".safetensors", ".gguf", *PICKLED}
_SHARD = re.compile(r".*-\d+-of-(\d+)\.safetensors")
_ENCODERS = re.compile(r"bert|siglip|^(t5|mpnet|nomic|colqwen)")


def folders_of(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the folders that are named. A checkpoint in an earlier one goes before its copy in a later one."""
    hub = (*LM_STUDIO, constants.HF_HUB_CACHE)
    named = (each for name in names for each in (hub if name == HUB else (name,)))
    return tuple(Path(each).expanduser().resolve() for each in named)


def checkpoints_in(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield ORG/NAME and the folder of each checkpoint below `root`: laid out as ORG/NAME, as NAME, where the folder's
    own name stands for ORG, or as in the hub's cache.
    """
    for folder in _entries(root):
        if folder.name.startswith("models--"):
            snapshots = [each for each in _entries(folder / "snapshots") if each.is_dir() and _entries(each)]
            if snapshots:
                latest = max(snapshots, key=lambda each: max(file.lstat().st_mtime for file in _entries(each)))
                yield folder.name.removeprefix("models--").replace("--", "/"), latest
        elif _is_checkpoint(folder):
            yield f"{root.name}/{folder.name}", folder
        elif folder.is_dir():
            yield from ((f"{folder.name}/{each.name}", each) for each in _entries(folder) if _is_checkpoint(each))


def _entries(folder: Path) -> list[Path]:
    """Return the entries by name, without those with a dot first; none if the folder cannot be read."""
    try:
        return files_of(folder, "*")
    except OSError:
        return []


def _is_checkpoint(folder: Path) -> bool:
    """Return whether the entry is a folder with files of a checkpoint, or a link to a folder, which may lead out."""
    files = [] if folder.is_symlink() else _entries(folder)
    has_files = any(file.name == "config.json" or _WEIGHTS.intersection(file.suffixes) for file in files)
    return folder.is_dir() and (folder.is_symlink() or has_files)


def look(folders: tuple[Path, ...], known: Iterable[Found]) -> list[Found]:
    """Return the checkpoints by name, the first of each name. One that is `known` is read again if it has changed."""
    same = {(each.folder, each.stamp): each for each in known}
    found: dict[str, Found] = {}
    for name, folder in chain.from_iterable(map(checkpoints_in, folders)):
        one = found.setdefault(name, Found(name=name, folder=folder))
        if one.folder != folder:
            continue
        try:
            check_links(folder, folders)
            files = [
                (str(file.relative_to(folder)), file.stat())
                for file in chain(folder.glob("[!.]*"), folder.glob("[!.]*/[!.]*"))
                if file.is_file()
            ]
            one.stamp = tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in files))
            found[name] = same.get((folder, one.stamp)) or _described(one, read_checkpoint(folder, inside=folders))
        except (ModelLoadError, OSError) as error:
            one.fault = in_words(error, one)
    return sorted(found.values(), key=lambda each: each.name.lower())


def in_words(error: Exception, found: Found) -> str:
    """Return an error's message with the name in place of the path, which clients need not know."""
    return str((isinstance(error, OSError) and error.strerror) or error).replace(str(found.folder), found.name)


def _described(found: Found, checkpoint: Checkpoint) -> Found:
    found.file_bytes, found.max_model_len = checkpoint.file_bytes, checkpoint.max_model_len
    shards = [shard[1] for file in weight_files(found.folder) if (shard := _SHARD.fullmatch(file.name)) is not None]
    if shards and len(shards) < int(shards[0]):
        found.fault = f"{len(shards)} of its {int(shards[0])} files of weights are here. Download the others."
        return found
    found.task = _task(checkpoint)
    if found.task in ("embedding", "rerank"):
        found.fault = "It computes vectors or scores of texts, and only models that write text are served."
    return found


def _task(checkpoint: Checkpoint) -> ModelTask:
    """Tell by the files what a checkpoint computes."""
    config, path = checkpoint.config, checkpoint.path
    if "ForSequenceClassification" in str(config.get("architectures")):
        return "rerank"
    if (path / "modules.json").is_file() or _ENCODERS.search(config["model_type"]):
        return "embedding"
    has_template = bool(read_json(path / "tokenizer_config.json").get("chat_template"))
    if not has_template and not (path / "chat_template.jinja").is_file():
        return "completion"
    sees = config.get("vision_config") and any("vis" in name for name in checkpoint.weight_names)
    return "vision" if sees else "chat"
