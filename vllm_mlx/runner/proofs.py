"""Proofs at load: which rows can share a batch or a forward pass, and whether a row can resume from a copy.

The first ones show which families use keys, values or masks in a special way (`grouped.py`). Two groups are
tried: one row, which needs no mask, and two rows of unlike lengths, which need one. Their logits are compared with
those of the same three rows in one batch cache. If they differ, they are compared with each row alone, less strictly: a
small difference can make a mixture of experts choose other experts.

Drafts are tried in two rows that take tokens back. The last proof concerns models with layers whose state is copied
whole, because this server does not know their classes. A row is copied and continues; then a new one continues from
the copy, and a third computes everything. All must agree.
"""

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Self, TypeVarTuple

import mlx.core as mx

from ..cache import layers, snapshot
from ..cache.node import Piece
from ..core.errors import first_line
from ..core.request import TokenSampling
from ..core.sequence import PromptInputs, Sequence
from ..core.step import BY_HEAD
from ..util.faults import device_fault
from .batch import Batch, Group, regroup
from .model import Model

Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)

_GROUPS = ((9, 4), (6,))  # tokens of the rows of each group
LIBRARY_ERRORS = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)  # of libraries
SAME_KERNELS = 0.999  # cosine of logits that the same kernels computed, except attention
SAME_LOGITS = 0.98  # cosine; half precision rounds differently for two rows, and wrong logits are far from it
_NOT_ALONE = "the results differ from each row's alone"
_COPIED, _LENGTH = 37, 60  # tokens of the row when it is copied, and at the end
_CUTS = (37, 64, 101, 102, 103, 192)  # the ends of chunks, of which some hold one token, as a decode step does
_ODD_SHARE = 20  # in half precision, rounding can choose other experts at one of these positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """Results that a load tried with a model, for other loads of the same weights. The defaults are assumed before."""

    can_batch: bool = True
    no_shared_forward: str | None = None
    no_prefix_cache: str | None = None
    no_drafts: str | None = None
    no_head: str | None = None
    whole_sizes: dict[int, int] | None = None
    no_chunks: str | None = None

    @classmethod
    def of(cls, model: Model) -> Self:
        return cls(**{field.name: getattr(model, field.name) for field in fields(cls)})

    def note_in(self, model: Model) -> None:
        model.can_batch, model.no_shared_forward = self.can_batch, self.no_shared_forward
        model.no_drafts, model.no_chunks = self.no_drafts, self.no_chunks
        if self.no_prefix_cache is not None:
            model.refuse_prefix_cache(self.no_prefix_cache)


def prove_rows(model: Model) -> None:
    """Record the limits of the model's rows in the model."""
    model.no_shared_forward = sharing_fault(model)
    if model.can_batch and model.no_shared_forward is not None and (fault := batching_fault(model)) is not None:
        logger.warning("Every row decodes alone: in a batch, %s", fault)
        model.can_batch = False
        model.no_shared_forward = sharing_fault(model)
    if model.proves_chunks and (fault := chunks_fault(model)) is not None:
        logger.warning("Every prompt is computed whole: %s", fault)
        model.no_chunks = model.no_drafts = fault
        model.refuse_prefix_cache(fault)
    if (fault := resume_fault(model)) is not None:
        model.refuse_prefix_cache(fault)
    model.no_drafts = model.no_drafts or drafts_fault(model)


def sharing_fault(model: Model) -> str | None:
    """Return the reason why rows of different groups cannot share a forward pass; None if they can."""
    if not model.can_batch:
        return "rows of this model cannot share a batch"
    return _fault(model, _likeness_in_groups, "its layers compute attention in a way of their own", _NOT_ALONE)


def _fault(model: Model, proof: Callable[[Model], float], failed: str, differs: str) -> str | None:
    """Return `failed` if the proof meets an error of a library, `differs` if its logits differ, and otherwise None."""
    likeness, error = _tried(model, proof)
    if error is not None:
        logger.info("A proof found that %s: %s: %s", failed, type(error).__name__, first_line(error, 200))
        return failed
    return None if likeness >= SAME_LOGITS else f"{differs} (cosine {likeness:.2f})"


def _tried(model: Model, proof: Callable[[Model, *Ts], float], *args: *Ts) -> tuple[float, Exception | None]:
    """Return the likeness that a proof finds, and the error of a library that ended it. Ranks find the same."""
    likeness, error = 0.0, None
    try:
        likeness = proof(model, *args)
    except (*LIBRARY_ERRORS, snapshot.DamagedSnapshot) as raised:
        if device_fault(raised) is not None:
            raise
        error = raised
    return model.agree(likeness, error), error


def _likeness_in_groups(model: Model) -> float:
    together = _logits(model, _GROUPS)
    if _equals_merged(model, together):
        return math.inf
    alone = mx.concatenate([_logits(model, [[num_tokens]]) for lengths in _GROUPS for num_tokens in lengths])
    return _least_cosine(alone, together)


def _equals_merged(model: Model, together: mx.array) -> bool:
    """Return whether three rows in groups have the same logits as in one batch cache, as the library computes them."""
    reason, model.no_shared_forward = model.no_shared_forward, "it is being tried"
    try:
        likeness, error = _tried(model, _likeness_merged, together)
        return error is None and likeness >= SAME_KERNELS
    finally:
        model.no_shared_forward = reason


def _likeness_merged(model: Model, together: mx.array) -> float:
    merged = _merged(model, chain.from_iterable(_GROUPS))
    logits = mx.stack([merged.forward(), merged.forward()], axis=1).astype(mx.float32)
    return _least_cosine(logits, together)


def batching_fault(model: Model) -> str | None:
    """Return the reason why rows of different lengths cannot share a batch; None if they can."""
    return _fault(model, _likeness_in_batch, "its layers take no rows of different lengths", _NOT_ALONE)


def _likeness_in_batch(model: Model) -> float:
    together = _merged(model, _GROUPS[0]).forward()
    alone = [_row(model, num_tokens).forward() for num_tokens in _GROUPS[0]]
    return _least_cosine(mx.concatenate(alone), together)


def chunks_fault(model: Model) -> str | None:
    """Return the reason why no prompt is cut into chunks: the logits differ. None if they are the same."""
    likeness, error = _tried(model, _likeness_in_chunks)
    if error is not None:
        logger.info("No prompt is cut into chunks: %s: %s", type(error).__name__, first_line(error, 200))
    elif likeness >= SAME_KERNELS:
        return None
    library, _, name = type(model.module).__module__.partition(".models.")
    name = name.partition(".")[0]
    return f"{library}'s {name} computes something else if a prompt is cut (cosine {likeness:.3f})"


def _likeness_in_chunks(model: Model) -> float:
    seq, end, found = _probe(model, _CUTS[-1]), _CUTS[-1], []
    for edges in ((0, end), (0, *_CUTS)):
        caches, logits = model.new_caches(), []
        for low, high in pairwise(edges):
            logits.append(model.prefill(seq, low, high, caches)[0])
            layers.leave_window(caches)
            layers.complete(logits[-1], layers.state_arrays(caches))
        found.append(mx.concatenate(logits))
    num_odd = 0 if found[0].dtype == mx.float32 else end // _ODD_SHARE
    likeness: float = mx.sort(_cosines(*(logits.astype(mx.float32) for logits in found)))[num_odd].item()  # type: ignore[assignment]
    return likeness


def drafts_fault(model: Model) -> str | None:
    """Return the reason why no drafts can be verified: tokens of a row cannot be undone. None if they can.

    Two rows take three tokens and keep one and two of them. One more forward pass must give the logits of rows that
    never had the others.
    """
    if not layers.verifies(model.structure):
        return "its layers cannot drop the last tokens of a row"
    differs = "the results differ after a draft is rejected"
    return _fault(model, _likeness_with_drafts, "its layers do not take several tokens of a row at once", differs)


def _likeness_with_drafts(model: Model) -> float:
    rows = [_row(model, num_tokens) for num_tokens in _GROUPS[0][: 1 if model.no_shared_forward else 2]]
    together = _gathered(rows, [group for row in rows for group in row.groups])
    blocks = [seq.tokens(seq.num_tokens - 1, seq.num_tokens) * 3 for seq in together.seqs]
    kept = list(range(1, 1 + len(blocks)))
    if model.num_head_layers:
        together.guess([[block[0], BY_HEAD, BY_HEAD] for block in blocks])
    layers.complete(together.feed_blocks(blocks))
    together.settle(blocks, kept, [block[0] for block in blocks])
    alone = [_row(model, num_tokens) for num_tokens in _GROUPS[0][: len(blocks)]]
    for row, num in zip(alone, kept, strict=True):
        for _ in range(num):
            layers.complete(row.forward())
    return _least_cosine(mx.concatenate([row.forward() for row in alone]), together.forward())


def try_head(model: Model) -> None:
    """Let the MTP head guess two tokens. Raises the errors of its library."""
    row = _row(model, _GROUPS[0][0])
    layers.complete(row.guess([[0, BY_HEAD, BY_HEAD]]), row.forward())


def resume_fault(model: Model) -> str | None:
    """Return the reason why no row can resume from a copy; None if it can, or if no layer is copied whole."""
    if not model.copied_whole or model.resume_rule is None:
        return None
    names = ", ".join(model.copied_whole)
    failed = f"a copy of its state ({names}) cannot be used"
    differs = f"a row that resumes from a copy of its state ({names}) differs from one that computes it"
    return _fault(model, _likeness_of_copy, failed, differs)


def _likeness_of_copy(model: Model) -> float:
    seq, row = _probe(model, _LENGTH), model.new_caches()
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
    return _least_cosine(last[1:], last[:1])


def _run(model: Model, seq: Sequence, caches: layers.LayerCaches, start: int, end: int) -> mx.array:
    """Return the logits of a chunk and of the token after it, which is fed alone: (1, n, vocab)."""
    logits = [model.prefill(seq, low, high, caches) for low, high in ((start, end - 1), (end - 1, end))]
    layers.leave_window(caches)
    layers.complete(*logits, layers.state_arrays(caches))
    return mx.concatenate(logits, axis=1)


def _probe(model: Model, num_tokens: int) -> Sequence:
    """Return a sequence that the proofs run, with one token more than `num_tokens`."""
    prompt = PromptInputs(token_ids=tuple(31 * num_tokens * k % model.vocab_size for k in range(num_tokens + 1)))
    return Sequence(seq_id=-num_tokens, prompt=prompt, sampling=TokenSampling(), max_tokens=1)


def _row(model: Model, num_tokens: int) -> Batch:
    """Make a row that has one token left to feed."""
    seq = _probe(model, num_tokens)
    seq.num_computed_tokens = num_tokens + 1
    caches = model.new_caches()
    model.prefill(seq, 0, num_tokens, caches)
    layers.complete(layers.state_arrays(caches))
    return Batch.of_row(model, seq, caches, num_tokens)


def _merged(model: Model, lengths: Iterable[int]) -> Batch:
    """Make one group of rows of these lengths."""
    rows = [_row(model, num_tokens) for num_tokens in lengths]
    return _gathered(rows, regroup([row.groups[0] for row in rows], [{row.seq_ids[0] for row in rows}]))


def _logits(model: Model, lengths: Rows[Rows[int]]) -> mx.array:
    """Two forward passes: each row a group, then in groups of rows of these lengths -> `(rows, 2, vocab)`."""
    rows = [_row(model, num_tokens) for group in lengths for num_tokens in group]
    single = _gathered(rows, [group for row in rows for group in row.groups])
    first = single.forward()
    merged = regroup(single.groups, [{-num_tokens for num_tokens in group} for group in lengths])
    return mx.stack([first, _gathered([single], merged).forward()], axis=1).astype(mx.float32)


def _gathered(batches: Iterable[Batch], groups: list[Group]) -> Batch:
    return Batch.gather(groups, {key: (batch, at) for batch in batches for at, key in enumerate(batch.seq_ids)})


def _least_cosine(a: mx.array, b: mx.array) -> float:
    least: float = mx.min(_cosines(a, b)).item()  # type: ignore[assignment]
    return least


def _cosines(a: mx.array, b: mx.array) -> mx.array:
    return (a * b).sum(axis=-1) / (mx.linalg.norm(a, axis=-1) * mx.linalg.norm(b, axis=-1))
