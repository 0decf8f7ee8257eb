"""Prevents Python code that comes with a checkpoint from running while the checkpoint is loaded.

transformers runs such code if a file of the checkpoint has an `auto_map` and the caller passes
`trust_remote_code=True`. Some processors of mlx-vlm always pass that.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import ModelLoadError, first_line, setting
from ..util.fence import Fence

logger = logging.getLogger(__name__)

# The functions with which transformers finds and runs a checkpoint's code. It calls them by these names in one module.
_LOADERS = ("get_cached_module_file", "get_class_in_module")
# Seconds that transformers waits for an answer at the terminal if its caller passes no `trust_remote_code`.
_QUESTION_S = "TIME_OUT_REMOTE_CODE"
_ASKS_FOR_TRUST = re.compile(r"trust[-_]remote[-_]code", re.IGNORECASE)
_MAPPED_FILES = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
                 "video_preprocessor_config.json", "config.json")  # fmt: skip
_MAX_REASON = 200  # characters of a library's message
_lock = threading.RLock()  # all threads share transformers' module


class RemoteCodeRefused(ModelLoadError):
    """A part of the checkpoint cannot be loaded without code that is not trusted."""


@contextmanager
def remote_code(
    path: Path, part: str, *, trusted: bool, failed: Callable[[Exception], ModelLoadError]
) -> Iterator[None]:
    """Load one part of a checkpoint in this block. If it is not trusted, its code does not run.

    Some parts load without their code. Raises RemoteCodeRefused for the others, and `failed(error)` if the libraries,
    which raise bare Exceptions too, cannot load the part. A ModelLoadError stays as it is. One thread loads at a time.
    """
    refused: list[str] = []
    fence = Fence("the user, who reads why the checkpoint cannot be loaded", is_logged=False)
    with _lock, fence, nullcontext() if trusted else _refusing(refused):
        yield
    error = fence.error
    if isinstance(error, ModelLoadError):
        raise error
    if error is not None and not trusted and (refused or _ASKS_FOR_TRUST.search(str(error))):
        raise RemoteCodeRefused(_refusal(path, part, refused, error)) from error
    if error is not None:
        raise failed(error) from error
    if refused:
        logger.warning(
            "The %s of %s is loaded without its own Python code (%s), which only %s lets run",
            part, path, _listed(refused), setting("trust_remote_code"),
        )  # fmt: skip


@contextmanager
def _refusing(refused: list[str]) -> Iterator[None]:
    """Keep transformers from running code, and add to `refused` the files that it would have run."""
    from transformers import dynamic_module_utils as module

    def refuse(_: Any, file: str, *__: Any, **___: Any) -> NoReturn:
        refused.append(Path(file).name)
        # Callers expect a ValueError for code that is not trusted; some of them then load the part without it.
        raise ValueError(f"{file} is not run without trust_remote_code")

    replaced: dict[str, Any] = dict.fromkeys(_LOADERS, refuse) | {_QUESTION_S: 0}
    kept = {name: getattr(module, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def _listed(files: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(files))


def _refusal(path: Path, part: str, refused: list[str], error: Exception) -> str:
    files = _listed(refused or _mapped(path))
    named = f" ({files})" if files else ""
    reason = "" if _ASKS_FOR_TRUST.search(str(error)) else f" ({first_line(error, _MAX_REASON)})"
    return (
        f"{path} brings its own Python code{named}, and its {part} cannot be loaded without it{reason}. "
        f"Read the code, and if you trust it, start with {setting('trust_remote_code')}."
    )


def _mapped(path: Path) -> list[str]:
    """Return the Python files that the checkpoint's `auto_map` entries name."""
    values = [_auto_map(path / name) for name in _MAPPED_FILES]
    files: list[str] = []
    while values:
        value = values.pop(0)
        if isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, str):  # such as "owner/name--module.Class"
            files.append(value.rpartition("--")[2].partition(".")[0] + ".py")
    return files


def _auto_map(file: Path) -> Any:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values.get("auto_map") if isinstance(values, dict) else None
