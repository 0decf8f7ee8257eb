"""Proves at load that a vision family is served right: its results for two images are compared with mlx-vlm's own.

A video is compared as well. If its results differ, videos are refused, and images are served.
"""

import logging
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.errors import ModelLoadError, Unsupported, first_line, setting
from ..core.request import TokenSampling
from ..core.sequence import PromptInputs, Sequence
from ..util.faults import device_fault
from .model import MultimodalModel
from .model_types import facts_of
from .vision_inputs import KNOWN_INPUTS, chunk_positions, input_arrays

logger = logging.getLogger(__name__)

# Cosines, since half precision rounds at every layer and differently for every shape. Wrong results are near 0.
_SAME_TOKEN = 0.9  # cosine of one token's features
_SAME_LOGITS = 0.9  # cosine of one token's logits, computed in one chunk and in several


def check_family(model: MultimodalModel, prompt: PromptInputs, inputs: Mapping[str, np.ndarray]) -> None:
    """Compare the results. `inputs` are the tensors of both images in one. Raises ModelLoadError if they differ."""
    fault = media_fault(model, prompt, inputs)
    if known := facts_of(model.module.config.model_type).image_fault:
        logger.warning(known)
    if fault is not None:
        raise ModelLoadError(
            f"Images of this family ({model.module.config.model_type!r}) cannot be served: {fault}. "
            f"Serve it with {setting('text_only')}."
        )


def media_fault(model: MultimodalModel, prompt: PromptInputs, inputs: Mapping[str, np.ndarray]) -> str | None:
    """Describe the difference of the results for a prompt's media from mlx-vlm's. `inputs`: tensors of all media."""
    try:
        fault = _difference(model, prompt, inputs)
    except (Unsupported, ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        if device_fault(error) is not None:
            raise
        fault = first_line(error, 200)
    model.forget_images()
    return None if fault is None else fault.rstrip(".")


def _difference(model: MultimodalModel, prompt: PromptInputs, inputs: Mapping[str, np.ndarray]) -> str | None:
    seq = Sequence(seq_id=-1, prompt=prompt, sampling=TokenSampling(), max_tokens=1)
    ids = mx.array([prompt.token_ids])
    given = input_arrays(inputs)
    whole = model.module.get_input_embeddings(ids, mask=mx.ones(ids.shape, mx.int32), **given).to_dict()
    whole = {name: value for name, value in whole.items() if value is not None}
    if unknown := set(whole) - KNOWN_INPUTS:
        return f"it needs {', '.join(sorted(unknown))}"
    ours = model.chunk_inputs(seq, prompt.media, ids, 0)
    for name in ("inputs_embeds", "per_layer_inputs", "deepstack_visual_embeds", "visual_pos_masks"):
        if not _is_close(ours.get(name), whole.get(name)):
            return f"`{name}` cannot be put together from single parts"
    if model.has_grid and "position_ids" in whole:
        positions = chunk_positions(model.items_in_grid(seq), 0, len(prompt.token_ids))
        theirs = np.array(whole["position_ids"]).reshape(-1, positions.shape[1])
        if not (np.broadcast_to(theirs, positions.shape) == positions).all():
            return "it places their tokens in another way"
    return _compare_logits(model, seq, ids, {**given, **whole})


def _compare_logits(model: MultimodalModel, seq: Sequence, ids: mx.array, whole: dict[str, Any]) -> str | None:
    language = model.module.language_model
    theirs = language(ids, cache=model.new_caches(), **whole).logits[0]
    caches = model.new_caches()
    edge, end = seq.prompt.media[0].end, ids.shape[1]
    parts = [model.prefill(seq, 0, edge, caches)[0], model.prefill(seq, edge, end - 1, caches)[0]]
    ours = mx.concatenate([*parts, model.decode([seq], [end - 1], ids[0, -1:], caches)])
    a, b = (np.array(logits.astype(mx.float32)) for logits in (ours, theirs))
    cosines = _cosines(a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True))
    if cosines.min() > _SAME_LOGITS:
        return None
    fault = f"in chunks it computes something else (similarity {cosines.min():.3f})"
    if not facts_of(model.module.config.model_type).images_shown:
        return fault
    logger.warning("Images or a video, tried at load: %s", fault)
    return None


def _is_close(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:
        return ours is None and theirs is None
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_is_close, ours, theirs))
    a, b = (np.array(array.astype(mx.float32)) for array in (ours, theirs))
    if a.shape != b.shape:
        return False
    if ours.dtype == mx.bool_:
        return bool((a == b).all())
    return bool((_cosines(a, b) > _SAME_TOKEN).all())


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosines of the vectors along the last axis; 1 if both vectors are zero."""
    dots, lengths = (a * b).sum(-1), np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines: np.ndarray = np.where(lengths > 0, dots / np.maximum(lengths, 1e-12), np.linalg.norm(a - b, axis=-1) == 0)
    return cosines
