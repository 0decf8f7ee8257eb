"""Downloads a checkpoint from Hugging Face into its cache. Every failure becomes a one-line error. It knows no mlx."""

from pathlib import Path

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

from ..core.errors import ModelLoadError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


def is_hub_id(model: str) -> bool:
    """Whether the name has the form org/name."""
    return not model.startswith((".", "/", "~")) and model.count("/") == 1


def download(model: str, revision: str | None = None) -> Path:
    """Download the files that are missing and return the folder. Progress goes to stderr. Raises ModelLoadError."""
    if not is_hub_id(model):
        raise ModelLoadError(f"No folder {model}. Give a folder that exists, or a Hugging Face id such as org/name.")
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
            "private ones need `hf auth login`."
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor a valid Hugging Face id.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{model} is not on this machine and could not be downloaded. Check the connection "
            "(and that HF_HUB_OFFLINE is not set), or give a local folder."
        ) from error
