"""From a name to a loaded checkpoint, and every way that can fail said in one line."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from ..core.errors import ModelLoadError
from ..demo import demo_path

DEMO = "demo"
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def max_model_len(self) -> int | None:
        text = self.config.get("text_config") or self.config
        for key in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
            if isinstance(text.get(key), int):
                return int(text[key])
        return None

    def fingerprint(self) -> str:
        """Identity of what state depends on: config, tokenizer, and the weights' names, shapes, types and sizes.

        The weights' bytes are represented by each file's header, size and time of change.
        """
        digest = hashlib.sha256()
        for name in ("config.json", "tokenizer.json"):
            file = self.path / name
            digest.update(file.read_bytes() if file.is_file() else b"")
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as stream:
                header = stream.read(int.from_bytes(stream.read(8), "little"))
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode() + header)
        return digest.hexdigest()[:32]

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("model*.safetensors"))


def find_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """A local folder, "demo", or a Hugging Face id, which is downloaded unless it is there already.

    Raises ModelLoadError.
    """
    path = demo_path() if model == DEMO else Path(model).expanduser()
    if not path.is_dir():
        path = _download(model, revision)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(f"{path} is not a checkpoint: it has no config.json. Point to the folder that holds it.")
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{config_file} is not valid JSON ({error}). Download the checkpoint again.") from error
    if "model_type" not in config:
        raise ModelLoadError(f"{config_file} names no model_type, so its architecture is unknown.")
    if not any(path.glob("model*.safetensors")):
        raise ModelLoadError(
            f"{path} holds no model*.safetensors. Download the weights, or convert them to safetensors."
        )
    return Checkpoint(path, config)


def _download(model: str, revision: str | None) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelLoadError(f"No folder {model}. Give a folder that exists, or a Hugging Face id such as org/name.")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: accept its licence on its Hugging Face page, then run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"No folder {model} here and no such model on Hugging Face. Check the spelling; "
            "private ones need `hf auth login`."
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor a valid Hugging Face id.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{model} is not on this machine and could not be downloaded. Check the connection "
            "(and that HF_HUB_OFFLINE is not set), or give a local folder."
        ) from error


def load_weights(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Any:
    """The mlx-lm model, its weights evaluated. Raises ModelLoadError."""
    try:
        model, _ = load_model(checkpoint.path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ModelLoadError(
            f"Cannot load {checkpoint.path} (architecture {checkpoint.architecture!r}): {_one_line(error)}. "
            "Is this architecture supported by the installed mlx-lm, and are all files complete?"
        ) from error
    mx.eval(model.parameters())
    return model


def weights_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")
