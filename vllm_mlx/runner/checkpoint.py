"""Finds a checkpoint, and downloads it if it is missing. Every failure becomes a one-line error. It knows no mlx."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..core.errors import ModelLoadError, first_line, setting
from ..formats.tokenizer import read_json
from .model_types import text_config
from .weight_files import INDEX, check_downloaded, files_of, model_files, read_header, tensors_of, weight_files

logger = logging.getLogger(__name__)

DEMO = "demo"  # names the checkpoint that comes with the package
DEMO_PATH = Path(__file__).parent.parent / "demo"
LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")  # folders of LM Studio's models, as ORG/NAME
HUB = "hub"  # names Hugging Face's cache and LM Studio's folders
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_WEIGHTS = {".safetensors", ".gguf", *_PICKLED}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "mtp_num_hidden_layers")
_MOST_LAYERS = 2000  # a library makes objects for each before it looks for weights
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]
    inside: tuple[Path, ...] = ()  # folders that its links must not leave; empty if they may lead anywhere

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def max_model_len(self) -> int | None:
        text = text_config(self.config)
        for key in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
            if isinstance(text.get(key), int) and text[key] > 0:
                return int(text[key])
        return None

    def fingerprint(self) -> str:
        """Return a digest of everything that cached state depends on: config, tokenizer and weights.

        Each file of weights is represented by its header, size and modification time.
        """
        digest = hashlib.sha256()
        for name in ("config.json", "tokenizer.json"):
            file = self.path / name
            digest.update(file.read_bytes() if file.is_file() else b"")
        for file in weight_files(self.path):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode() + read_header(file))
        return digest.hexdigest()[:32]

    def check_unchanged(self, fingerprint: str) -> None:
        """Raise ModelLoadError unless the files are those that had this fingerprint."""
        try:
            check_links(self.path, self.inside)
            if self.fingerprint() == fingerprint:
                return
            if self.file_bytes:
                fault = "has changed on disk. Put the earlier files back, or start the server again"
            else:
                fault = "is no longer on disk. Put it back, or start the server with another model"
        except OSError as error:
            fault = f"cannot be read: {error.strerror or error}. Correct this, or start the server with another model"
        raise ModelLoadError(f"Its checkpoint {fault}.")

    @cached_property
    def has_vision_encoder(self) -> bool:
        """Return whether the checkpoint has weights of a vision encoder, and mlx-vlm knows its family."""
        if not self.config.get("vision_config") or not any("vis" in name for name in self.weight_names):
            return False
        return _knows(self.config)

    @cached_property
    def weight_names(self) -> set[str]:
        """Return the names of all tensors. Raises ModelLoadError for a file that holds no weights."""
        return {name for file in weight_files(self.path) for name in tensors_of(file)}

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in model_files(self.path))


def folder_of(model: str, revision: str | None = None) -> Path | None:
    """Return the folder of "demo", of a path, or of a model of LM Studio. Returns None if that does not exist."""
    if model == DEMO:
        return DEMO_PATH
    is_of_lm_studio = revision is None and is_hub_id(model)
    places = [model, *(f"{root}/{model}" for root in LM_STUDIO if is_of_lm_studio)]
    return next((folder for place in places if (folder := Path(place).expanduser()).is_dir()), None)


def folders_of(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the folders that are named. A checkpoint in an earlier one goes before its copy in a later one."""
    named = chain.from_iterable((*LM_STUDIO, constants.HF_HUB_CACHE) if name == HUB else (name,) for name in names)
    return tuple(Path(each).expanduser().resolve() for each in named)


def checkpoints(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return ORG/NAME and the folder of each checkpoint by name, in the first of the folders that has it."""
    found = [*chain.from_iterable(map(_checkpoints_in, folders))]
    return sorted(dict(reversed(found)).items(), key=lambda each: each[0].lower())


def _checkpoints_in(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the checkpoints as in the hub's cache, as ORG/NAME, or as NAME in a folder whose name is the ORG."""
    for folder in _folders(root):
        if folder.name.startswith("models--") and not folder.is_symlink():
            if snapshots := [each for each in _folders(folder / "snapshots") if _is_checkpoint(each)]:
                name = folder.name.removeprefix("models--").replace("--", "/")
                yield name, max(snapshots, key=lambda each: each.stat().st_mtime)
        elif _is_checkpoint(folder):
            yield f"{root.name}/{folder.name}", folder
        else:
            yield from ((f"{folder.name}/{each.name}", each) for each in _folders(folder) if _is_checkpoint(each))


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder whose names can be written as text."""
    return [each for each in _entries(folder) if each.name.isprintable() and each.is_dir()]


def _entries(folder: Path) -> list[Path]:
    try:
        return [] if folder.is_symlink() else files_of(folder, "*")
    except OSError:  # it has just gone
        return []


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has files of a checkpoint, or is a link, which may lead out and is not followed here."""
    are_own = (file.name == "config.json" or _WEIGHTS.intersection(file.suffixes) for file in _entries(folder))
    return folder.is_symlink() or any(are_own)


def find_checkpoint(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find a local folder, "demo", or a Hugging Face id, whose files are downloaded if they are missing.

    A model that LM Studio has under this id is not downloaded again. Raises ModelLoadError.
    """
    try:
        path = folder_of(model, revision)
        if path is not None and revision is not None:
            raise ModelLoadError(f"{setting('revision')} is for models on Hugging Face, and {model} is a folder here.")
        return read_checkpoint(path or download(model, revision), trust_remote_code=trust_remote_code)
    except (OSError, RuntimeError) as error:  # a RuntimeError is that of `~NAME` without such a user
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelLoadError(
            f"{getattr(error, 'filename', None) or model} cannot be read: {reason or first_line(error)}. Correct this."
        ) from error


def check_links(path: Path, inside: Sequence[Path]) -> None:
    """Raise ModelLoadError for a link to a checkpoint, or in it, that leads out of the folders."""
    for entry in chain([path], path.glob("*"), path.glob("*/*")) if inside else ():
        try:
            target = entry.resolve()
        except RuntimeError as error:
            raise ModelLoadError(f"{entry} is a link that leads to itself. Remove it.") from error
        if not any(target.is_relative_to(folder) for folder in inside):
            raise ModelLoadError(f"{entry} is a link that leads out of the models' folders. Copy the files there.")


def read_checkpoint(path: Path, *, trust_remote_code: bool = False, inside: tuple[Path, ...] = ()) -> Checkpoint:
    """Read the config and all headers. Raises ModelLoadError, also for a link out of `inside`, and OSError."""
    check_links(path, inside)
    small = [file for pattern in FILES for file in files_of(path, pattern) if file.suffix != ".safetensors"]
    check_downloaded([*(file for file in small if file.name != INDEX), *weight_files(path)])
    if (ggufs := files_of(path, "*.gguf")) and not model_files(path):
        raise _is_gguf(ggufs[0])
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(f"{path} is not a checkpoint: it has no config.json. Point to the folder that holds it.")
    config = read_json(config_file)
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{config_file} names no model_type, so its architecture is unknown.")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if names := [name for name in _LAYERS if isinstance(part.get(name), int) and part[name] > _MOST_LAYERS]:
            most = f"and a model of at most {_MOST_LAYERS} layers is served. Use another checkpoint."
            raise ModelLoadError(f"{config_file} has {names[0]} {part[names[0]]}, {most}")
    if not model_files(path):
        raise ModelLoadError(_no_weights(path))
    if config.get("model_file") and not trust_remote_code:  # mlx-vlm would run it without asking
        raise ModelLoadError(
            f"{path} brings its own Python code ({config['model_file']}). Read it, and if you trust it, "
            f"start with {setting('trust_remote_code')}."
        )
    checkpoint = Checkpoint(path, config, inside)
    # Each header is read here, so that a damaged file is named before anything is loaded.
    logger.debug("%s has %d tensors", path, len(checkpoint.weight_names))
    return checkpoint


def _is_gguf(model: Path | str) -> ModelLoadError:
    advice = "Look for the same model in mlx-community on Hugging Face."
    return ModelLoadError(f"{model} is a GGUF file; this server loads MLX checkpoints. {advice}")


def _no_weights(path: Path) -> str:
    pickled = [file.name for file in files_of(path, "*") if file.suffix in _PICKLED]
    if pickled:
        return (
            f"{path} holds its weights only as {pickled[0]}. Such a file can run code when it is read and is not "
            "loaded: convert it to safetensors."
        )
    return f"{path} holds no model*.safetensors. Download the weights, or convert them to safetensors."


def _knows(config: dict[str, Any]) -> bool:
    """Return whether mlx-vlm knows the family."""
    from mlx_vlm.utils import get_model_and_args  # here, because a text model does not need it

    try:
        family, _ = get_model_and_args(dict(config))
    except (ValueError, ImportError, TypeError, AttributeError):
        logger.warning("mlx-vlm does not know the vision encoder of %r: only text is served", config.get("model_type"))
        return False
    return hasattr(family, "VisionModel")


def is_hub_id(model: str) -> bool:
    """Return whether the name has the form org/name."""
    return not model.startswith((".", "/", "~")) and model.count("/") == 1


def check_name(model: str) -> None:
    """Raise ModelLoadError if a model that has no folder here cannot be on Hugging Face in MLX's format."""
    if model.lower().endswith("gguf"):
        raise _is_gguf(model)
    if not is_hub_id(model):
        raise ModelLoadError(f"No folder {model}. Give a folder that exists, or a Hugging Face id such as org/name.")


def download(model: str, revision: str | None = None) -> Path:
    """Download the files that are missing and return the folder. Progress goes to stderr. Raises ModelLoadError."""
    check_name(model)
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: accept its licence on its Hugging Face page, then run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"No folder {model} here and no such model on Hugging Face. Check the spelling; "
            "private models need `hf auth login`."
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor a valid Hugging Face id.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{model} is not on this machine and could not be downloaded. Check the connection "
            "(and that HF_HUB_OFFLINE is not set), or give a local folder."
        ) from error
