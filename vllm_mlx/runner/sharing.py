"""Proof at load that rows in separate groups can share a forward pass: two rows, against each of them alone.

This shows which families use keys, values or masks in a way of their own (`grouped.py`). It also compiles the kernels
that two rows need before a request waits for them.
"""

import logging

import mlx.core as mx

from ..cache import layers
from ..core.errors import first_line
from ..core.faults import device_fault
from ..core.sequence import PromptInputs, Sequence, TokenSampling
from .batch import Batch
from .model import Model

logger = logging.getLogger(__name__)

_LENGTHS = (9, 4)  # tokens of the two rows
_SAME_LOGITS = 0.98  # cosine; half precision rounds differently for two rows, and what is wrong is far from it


def sharing_fault(model: Model) -> str | None:
    """Why rows of different groups cannot share a forward pass. None: they can."""
    if not model.can_batch:
        return "the state of its layers cannot be batched"
    try:
        alone = [_logits([_row(model, num_tokens)]) for num_tokens in _LENGTHS]
        together = _logits([_row(model, num_tokens) for num_tokens in _LENGTHS])
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        if device_fault(error) is not None:
            raise
        logger.info("Rows cannot share a forward pass: %s: %s", type(error).__name__, first_line(error, 200))
        return "its layers compute attention in a way of their own"
    likeness = min(_cosine(together[row], logits[0]) for row, logits in enumerate(alone))
    return None if likeness >= _SAME_LOGITS else f"the results differ from each row's alone (cosine {likeness:.2f})"


def _row(model: Model, num_tokens: int) -> Batch:
    """A row that has one token left to feed."""
    prompt = PromptInputs(token_ids=tuple(31 * num_tokens * k % model.vocab_size for k in range(num_tokens + 1)))
    seq = Sequence(seq_id=-num_tokens, prompt=prompt, sampling=TokenSampling(), max_tokens=1)
    seq.num_computed_tokens = num_tokens + 1
    caches = model.new_caches()
    model.prefill(seq, 0, num_tokens, caches)
    layers.complete(layers.state_arrays(caches))
    return Batch.of_row(model, seq, caches, num_tokens)


def _logits(rows: list[Batch]) -> mx.array:
    places = {seq_id: (row, 0) for row in rows for seq_id in row.seq_ids}
    batch = Batch.gather([group for row in rows for group in row.groups], places)
    return batch.forward().astype(mx.float32)


def _cosine(a: mx.array, b: mx.array) -> float:
    return float((a @ b / (mx.linalg.norm(a) * mx.linalg.norm(b))).item())
