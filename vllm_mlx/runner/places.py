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
from .weight_files import files_of

HUB = "hub"  # names Hugging Face's cache and LM Studio's folders
_WEIGHTS = {".safetensors", ".gguf", *PICKLED}
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_ENCODERS = re.compile(r"bert|siglip|^(t5|mpnet|nomic|colqwen)")
_NO_ENCODER = "It computes vectors or scores of texts, and only models that write text are served."
Known = dict[tuple[Path, object], Found]  # by folder, and by names, sizes and times of its files


def folders_of(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the folders that are named. A checkpoint in an earlier one goes before its copy in a later one."""
    named = chain.from_iterable((*LM_STUDIO, constants.HF_HUB_CACHE) if name == HUB else (name,) for name in names)
    return tuple(Path(each).expanduser().resolve() for each in named)


def checkpoints(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return ORG/NAME and the folder of each checkpoint by name, in the first of the folders that has it."""
    found = [*chain.from_iterable(map(_checkpoints_in, folders))]
    return sorted(dict(reversed(found)).items(), key=lambda each: each[0].lower())


def _checkpoints_in(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the checkpoints as in the hub's cache, as ORG/NAME, or as NAME in a folder whose name stands for ORG."""
    for folder in _folders(root):
        if folder.name.startswith("models--"):
            if snapshots := [each for each in _folders(folder / "snapshots") if files_of(each, "*")]:
                name = folder.name.removeprefix("models--").replace("--", "/")
                yield name, max(snapshots, key=lambda each: each.stat().st_mtime)
        elif _is_checkpoint(folder):
            yield f"{root.name}/{folder.name}", folder
        else:
            yield from ((f"{folder.name}/{each.name}", each) for each in _folders(folder) if _is_checkpoint(each))


def _folders(folder: Path) -> list[Path]:
    try:
        return [each for each in files_of(folder, "*") if each.is_dir()]
    except OSError:  # it has just gone
        return []


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has files of a checkpoint, or is a link, which may lead out and is not followed here."""
    files = [] if folder.is_symlink() else files_of(folder, "*")
    return folder.is_symlink() or any(f.name == "config.json" or _WEIGHTS.intersection(f.suffixes) for f in files)


def read_headers(name: str, folder: Path, inside: tuple[Path, ...], known: Known) -> Found:
    """Describe a checkpoint. One that is `known` is not read again until it changes."""
    found = Found(name=name, folder=folder)
    try:
        check_links(folder, inside)
        files = [each for each in chain(folder.glob("[!.]*"), folder.glob("[!.]*/[!.]*")) if each.is_file()]
        stats = sorted((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
        if (same := known.get((folder, tuple(stats)))) is not None:
            return same
        found.modified_s = max(time_ns for _, time_ns, _ in stats) // 10**9
        checkpoint = read_checkpoint(folder, inside=inside)
        found.file_bytes, found.max_model_len = checkpoint.file_bytes, checkpoint.max_model_len
        shards = [shard[1] for file in files if (shard := _SHARD.fullmatch(file.name)) is not None]
        if shards and len(shards) < int(shards[0]):
            raise ModelLoadError(f"{len(shards)} of its {int(shards[0])} files are here. Download the others.")
        found.task = _task(checkpoint)
        found.fault = _NO_ENCODER if found.task in ("embedding", "rerank") else None
        known[folder, tuple(stats)] = found
    except (ModelLoadError, OSError) as error:
        found.fault = in_words(error, found)
    return found


def in_words(error: Exception, found: Found) -> str:
    """Return an error's message with the name in place of the path, which clients need not know."""
    return str((isinstance(error, OSError) and error.strerror) or error).replace(str(found.folder), found.name)


def _task(checkpoint: Checkpoint) -> ModelTask:
    config, path = checkpoint.config, checkpoint.path
    if "ForSequenceClassification" in str(config.get("architectures")):
        return "rerank"
    if (path / "modules.json").is_file() or _ENCODERS.search(config["model_type"]):
        return "embedding"
    settings = read_json(path / "tokenizer_config.json")
    if "chat_template" not in settings and not (path / "chat_template.jinja").is_file():
        return "completion"
    sees = config.get("vision_config") and any("vis" in name for name in checkpoint.weight_names)
    return "vision" if sees else "chat"
