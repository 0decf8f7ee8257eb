"""Proofs at load: which rows can share a batch or a forward pass, and whether a row can resume from a copy.

The last one concerns models with layers whose state is copied whole, because this server does not know their classes.
A row is copied and goes on; then a new one goes on from the copy, and a third computes everything. All must agree.
"""

import logging

import mlx.core as mx

from ..cache import layers, snapshot
from ..cache.node import Piece
from ..core.errors import first_line
from ..core.faults import device_fault
from ..core.sequence import Sequence
from .model import Model
from .sharing import LIBRARY_ERRORS, SAME_LOGITS, batching_fault, least_cosine, probe, sharing_fault

logger = logging.getLogger(__name__)

_COPIED, _LENGTH = 37, 60  # tokens of the row when it is copied, and at the end


def prove_rows(model: Model) -> None:
    """Note in the model what its rows cannot do."""
    model.no_shared_forward = sharing_fault(model)
    if model.can_batch and model.no_shared_forward is not None and (fault := batching_fault(model)) is not None:
        logger.warning("Every row decodes alone: in a batch, %s", fault)
        model.can_batch = False
        model.no_shared_forward = sharing_fault(model)
    if (fault := resume_fault(model)) is not None:
        model.refuse_prefix_cache(fault)


def resume_fault(model: Model) -> str | None:
    """Why no row can resume from a copy of another. None: it can, or no layer of the model is copied whole."""
    if not model.copied_whole or model.resume_rule is None:
        return None
    names = ", ".join(model.copied_whole)
    try:
        likeness = _likeness(model)
    except (*LIBRARY_ERRORS, snapshot.DamagedSnapshot) as error:
        if device_fault(error) is not None:
            raise
        logger.info("No row can resume: %s: %s", type(error).__name__, first_line(error, 200))
        return f"a copy of its state ({names}) cannot be used"
    if likeness >= SAME_LOGITS:
        return None
    return f"a row that resumes from a copy of its state ({names}) differs from one that computes it"


def _likeness(model: Model) -> float:
    seq, row = probe(model, _LENGTH), model.new_caches()
    _run(model, seq, row, 0, _COPIED)
    kv, states = layers.split(row)
    view = snapshot.view(kv, 0, states, 0, _COPIED)
    segment, window_start, state = snapshot.capture(view, 0, _COPIED, model.window)
    own = _run(model, seq, row, _COPIED, _LENGTH)
    piece = Piece(segment=segment, start=0, end=_COPIED, window_start=window_start, take=_COPIED)
    restored = model.new_caches()
    snapshot.restore(restored, [piece], state, length=_COPIED, capacity=_LENGTH)
    logits = [own, _run(model, seq, restored, _COPIED, _LENGTH), _run(model, seq, model.new_caches(), 0, _LENGTH)]
    last = mx.stack([array[0, -2:].astype(mx.float32) for array in logits])
    return least_cosine(last[1:], last[:1])


def _run(model: Model, seq: Sequence, caches: layers.LayerCaches, start: int, end: int) -> mx.array:
    """The logits of a chunk and of the token after it, which is fed alone: (1, n, vocab)."""
    logits = [model.prefill(seq, low, high, caches) for low, high in ((start, end - 1), (end - 1, end))]
    layers.leave_window(caches)
    layers.complete(*logits, layers.state_arrays(caches))
    return mx.concatenate(logits, axis=1)
