"""Loads a checkpoint: chooses the library that runs it, and an MTP head that joins it."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import ModelLoadError, first_line, setting
from ..formats.remote_code import remote_code
from .checkpoint import Checkpoint
from .experts import join_experts
from .libraries import knows
from .libraries import load_model as load_text_model
from .loading import SLICE_BYTES, Loading
from .model import Model, MultimodalModel, TextModel
from .model_types import facts_of, kernel_fault, records_states
from .proofs import LIBRARY_ERRORS, Proofs
from .ranked import Lockstep, Ranked
from .weight_files import index_fault, readable

logger = logging.getLogger(__name__)
LOAD_ERRORS = (OSError, ImportError, *LIBRARY_ERRORS)


class Beside(Protocol):
    """A module that is loaded with a model, and joins it."""

    def load(self) -> Any:
        """Return a module, whose weights are read after the model's. Returns None if there is nothing to load."""

    def join(self, model: Model, module: Any, proofs: Proofs | None) -> Model:
        """Return the model that runs with the module, or with nothing instead. Raises ModelLoadError."""


def load_model(checkpoint: Checkpoint, *, trust_remote_code: bool, text_only: bool = False) -> Model:
    """Load the weights. A checkpoint with a vision encoder that mlx-vlm knows is run by mlx-vlm, text included.

    `text_only` leaves the vision encoder out and uses mlx-lm. Raises ModelLoadError.
    """
    loading = begin_loading(checkpoint, trust_remote_code=trust_remote_code, text_only=text_only)
    return loading.complete()


def begin_loading(
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool,
    text_only: bool = False,
    has_drafts: bool = False,
    beside: Beside | None = None,
    proofs: Proofs | None = None,
    slice_bytes: int = SLICE_BYTES,
    lockstep: Lockstep | None = None,
) -> Loading[Model]:
    """Begin to load the weights in slices, and the module `beside`, which joins them. Raises ModelLoadError.

    With `has_drafts`, mlx-vlm also runs a text model if only mlx-vlm records the states that drafts need. Results in
    the `proofs` of another load are not tried again. With `lockstep`, which mlx-lm alone can, only this rank's shard
    of the weights stays in memory.
    """
    only_text = text_only or not checkpoint.has_vision_encoder
    by_mlx_lm = only_text and knows(checkpoint.config)
    fault = kernel_fault(checkpoint.config, by_mlx_vlm=not by_mlx_lm, in_mlx_lm=knows(checkpoint.config))
    if fault is not None and mx.metal.is_available():
        raise ModelLoadError(f"{checkpoint.path} cannot be served on Metal: {fault}")
    if text_only and checkpoint.has_vision_encoder:
        logger.info("Text only, as configured: the vision encoder of %s is not loaded", checkpoint.path)
    load, library = (_load_text, "mlx-lm") if by_mlx_lm else (_load_vision, "mlx-vlm")
    if by_mlx_lm and has_drafts and records_states(checkpoint.config):
        load = _load_language_or_text
    elif only_text and not by_mlx_lm:
        load, library = _load_language, "mlx-vlm (mlx-lm has no module for it)"
        logger.info("mlx-lm does not know %r: mlx-vlm runs its text", checkpoint.architecture)
    elif not by_mlx_lm:
        logger.info("A vision checkpoint: mlx-vlm runs text and images")

    if facts_of(checkpoint.architecture).no_compile:
        logger.warning("MLX's compilation is off: mlx-vlm's %r would be wrong with it", checkpoint.architecture)
        mx.disable_compile()

    def build() -> list[Any]:
        modules = [load(checkpoint.path, trust_remote_code), None if beside is None else beside.load()]
        if lockstep is not None:
            modules[0].shard(lockstep.group)
        join_experts(modules[0])
        return [module for module in modules if module is not None]

    def make(module: Any, other: Any = None) -> Model:
        if lockstep is not None:
            return Ranked(module, lockstep)
        is_text = by_mlx_lm and not type(module).__module__.startswith("mlx_vlm.")
        sizes = None if proofs is None else proofs.whole_sizes
        model: Model = TextModel(module, sizes) if is_text else MultimodalModel(module, sizes)
        model.proves_chunks = only_text and not by_mlx_lm
        model = model if beside is None else beside.join(model, other, proofs)
        if proofs is not None:
            proofs.note_in(model)
        return model

    return Loading(build, make, partial(explaining, checkpoint, library, trust_remote_code), slice_bytes=slice_bytes)


@contextmanager
def advising(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Iterator[None]:
    """Leave the advice to serve only text out of a ModelLoadError of the block if the text cannot be loaded either."""
    try:
        yield
    except ModelLoadError as error:
        try:
            begin_loading(checkpoint, trust_remote_code=trust_remote_code, text_only=True).check()
        except ModelLoadError:
            advice = f"(, or s|[.] S)erve it with {setting('text_only')}"
            raise type(error)(re.sub(advice, "", error.message)) from error
        raise


def explaining(checkpoint: Checkpoint, library: str, trust_remote_code: bool) -> AbstractContextManager[None]:
    """Raise ModelLoadError, which names the checkpoint, instead of errors of the library that loads it."""

    def failed(error: Exception) -> ModelLoadError:
        reasons = [first_line(error, 300).rstrip("."), index_fault(checkpoint.path)]
        return ModelLoadError(
            f"Cannot load {checkpoint.path} (architecture {checkpoint.architecture!r}): "
            f"{'. The index '.join(filter(None, reasons))}. "
            f"Is this architecture supported by the installed {library}, and are all files complete?"
        )

    return remote_code(checkpoint.path, "model", trusted=trust_remote_code, failed=failed)


def _load_text(path: Path, trust_remote_code: bool) -> Any:
    return load_text_model(path, lazy=True, trust_remote_code=trust_remote_code)[0]


def _load_vision(path: Path, trust_remote_code: bool) -> Any:
    from mlx_vlm.utils import load_model as load_vision_model

    with readable(path) as folder:
        return load_vision_model(folder, lazy=True, trust_remote_code=trust_remote_code)


def _load_language(path: Path, trust_remote_code: bool) -> Any:
    """Load mlx-vlm's text model. Raises ModelLoadError if it does not write a text token by token."""
    logging.getLogger().addFilter(_tells_more)
    try:
        module = _load_vision(path, trust_remote_code)
    finally:
        logging.getLogger().removeFilter(_tells_more)
    from mlx_vlm.generate.diffusion import is_diffusion_model

    if not hasattr(module, "language_model") or is_diffusion_model(module):
        family = type(module).__module__.rpartition(".")[2]
        raise ModelLoadError(
            f"{path} cannot be served: a model of this family ({family}) does not write a text token by token. "
            "Use another checkpoint."
        )
    for name, part in list(module.items()):
        if isinstance(part, nn.Module) and name != "language_model":
            setattr(module, name, None)
    return module


def _load_language_or_text(path: Path, trust_remote_code: bool) -> Any:
    """Load the language model by mlx-vlm, or by mlx-lm if mlx-vlm cannot."""
    try:
        return _load_language(path, trust_remote_code)
    except LOAD_ERRORS as error:
        logger.warning("mlx-lm runs this model, without drafts: %s", first_line(error, 300))
    return _load_text(path, trust_remote_code)


def _tells_more(record: logging.LogRecord) -> bool:
    """Leave out mlx-vlm's warning that a text checkpoint has no vision encoder, and an error that is raised as well."""
    text = record.getMessage()
    return not ("no weights for module(s): " in text or text.startswith("Model type "))
