"""Proof at load that rows can share a batch, and a forward pass in separate groups.

This shows which families use keys, values or masks in a way of their own (`grouped.py`). A group of one row has no
mask, one of unlike rows has one. Three rows in groups are compared with the same rows merged, whose products have the
same kernels, and where that shows a difference, with each row alone: a mixture of experts may choose others for it.
"""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import mlx.core as mx

from ..cache import layers
from ..core.errors import first_line
from ..core.faults import device_fault
from ..core.sequence import PromptInputs, Sequence, TokenSampling
from .batch import Batch, Group, regroup
from .model import Model

logger = logging.getLogger(__name__)

_GROUPS = ((9, 4), (6,))  # tokens of the rows of each group
LIBRARY_ERRORS = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)  # what libraries raise
SAME_KERNELS = 0.999  # cosine of logits that the same kernels computed, but for attention
SAME_LOGITS = 0.98  # cosine; half precision rounds differently for two rows, and what is wrong is far from it


def sharing_fault(model: Model) -> str | None:
    """Why rows of different groups cannot share a forward pass. None: they can."""
    if not model.can_batch:
        return "rows of this model cannot share a batch"
    try:
        together = _logits(model, _GROUPS)
        if _equals_merged(model, together):
            return None
        alone = mx.concatenate([_logits(model, [[num_tokens]]) for lengths in _GROUPS for num_tokens in lengths])
        likeness = least_cosine(alone, together)
    except LIBRARY_ERRORS as error:
        if device_fault(error) is not None:
            raise
        logger.info("Rows cannot share a forward pass: %s: %s", type(error).__name__, first_line(error, 200))
        return "its layers compute attention in a way of their own"
    return None if likeness >= SAME_LOGITS else f"the results differ from each row's alone (cosine {likeness:.2f})"


def _equals_merged(model: Model, together: mx.array) -> bool:
    """Whether three rows in groups have the logits of the same rows in one batch cache, as the library has it."""
    reason, model.no_shared_forward = model.no_shared_forward, "it is being tried"
    try:
        rows = [_row(model, num_tokens) for lengths in _GROUPS for num_tokens in lengths]
        merged = _gathered(
            rows, regroup([group for row in rows for group in row.groups], [{row.seq_ids[0] for row in rows}])
        )
        logits = mx.stack([merged.forward(), merged.forward()], axis=1).astype(mx.float32)
        return least_cosine(logits, together) >= SAME_KERNELS
    except LIBRARY_ERRORS as error:
        if device_fault(error) is not None:
            raise
        return False
    finally:
        model.no_shared_forward = reason


def batching_fault(model: Model) -> str | None:
    """Why rows of different lengths cannot share a batch. None: they can."""
    try:
        rows = [_row(model, num_tokens) for num_tokens in _GROUPS[0]]
        merged = regroup([group for row in rows for group in row.groups], [{-num_tokens for num_tokens in _GROUPS[0]}])
        together = _gathered(rows, merged).forward()
        alone = [_row(model, num_tokens).forward() for num_tokens in _GROUPS[0]]
        likeness = least_cosine(mx.concatenate(alone), together)
    except LIBRARY_ERRORS as error:
        if device_fault(error) is not None:
            raise
        return f"{type(error).__name__}: {first_line(error, 200)}"
    return None if likeness >= SAME_LOGITS else f"the results differ from each row's alone (cosine {likeness:.2f})"


def probe(model: Model, num_tokens: int) -> Sequence:
    """A sequence that the proofs run, with one token more than `num_tokens`."""
    prompt = PromptInputs(token_ids=tuple(31 * num_tokens * k % model.vocab_size for k in range(num_tokens + 1)))
    return Sequence(seq_id=-num_tokens, prompt=prompt, sampling=TokenSampling(), max_tokens=1)


def _row(model: Model, num_tokens: int) -> Batch:
    """A row that has one token left to feed."""
    seq = probe(model, num_tokens)
    seq.num_computed_tokens = num_tokens + 1
    caches = model.new_caches()
    model.prefill(seq, 0, num_tokens, caches)
    layers.complete(layers.state_arrays(caches))
    return Batch.of_row(model, seq, caches, num_tokens)


def _logits(model: Model, lengths: Rows[Rows[int]]) -> mx.array:
    """Two forward passes: each row a group, then in groups of rows of these lengths -> `(rows, 2, vocab)`."""
    rows = [_row(model, num_tokens) for group in lengths for num_tokens in group]
    single = _gathered(rows, [group for row in rows for group in row.groups])
    first = single.forward()
    merged = regroup(single.groups, [{-num_tokens for num_tokens in group} for group in lengths])
    return mx.stack([first, _gathered([single], merged).forward()], axis=1).astype(mx.float32)


def _gathered(batches: Iterable[Batch], groups: list[Group]) -> Batch:
    return Batch.gather(groups, {key: (batch, at) for batch in batches for at, key in enumerate(batch.seq_ids)})


def least_cosine(a: mx.array, b: mx.array) -> float:
    norms = mx.linalg.norm(a, axis=-1) * mx.linalg.norm(b, axis=-1)
    least: float = mx.min((a * b).sum(axis=-1) / norms).item()  # type: ignore[assignment]
    return least
