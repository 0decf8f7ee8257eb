"""Verifies drafts: one forward pass over the last token and drafts of each row, then a comparison with its draws.

Every place is drawn with the noise and the mask of its position, so a draft is kept if it is the token that the row
would have drawn there. The reply is therefore the same with and without drafts, up to the rounding of the logits.
"""

from collections.abc import Sequence as Rows

import mlx.core as mx

from ..core.sequence import Sequence
from ..core.step import BY_HEAD, Drafts, TokenOutput, Verified
from .batch import Batch
from .masks import Masks
from .row_constraint import Filled


def verify(batch: Batch, drafts: Drafts, masks: Masks) -> tuple[list[TokenOutput], list[Verified]]:
    """Feed each row its last token and its drafts, and wait. The rows then hold the state of the kept tokens.

    Returns the tokens that are kept, at least one for each row, and the counts of the rows that had drafts.
    """
    blocks = [[*seq.tokens(seq.prefill_end, seq.num_tokens), *drafts.get(seq.seq_id, ())] for seq in batch.seqs]
    if (guessed := batch.guess(blocks)) is not None:
        mx.async_eval(guessed)  # type: ignore[no-untyped-call]
    logits = batch.feed_blocks(blocks, guessed)
    mx.async_eval(logits)  # type: ignore[no-untyped-call]  # masks are computed while the device works
    if guessed is not None:
        _fill(blocks, guessed)
    words, filled = masks.block_words(batch.seqs, blocks)
    drawn = batch.draw_blocks(logits, blocks, words).read()
    tokens: list[TokenOutput] = []
    kept, following, start = [], [], 0
    for seq, block, own in zip(batch.seqs, blocks, filled, strict=True):
        kept.append(_num_kept(seq, block[1:], drawn[start : start + len(block)], own, masks))
        tokens += drawn[start : start + kept[-1]]
        following.append(tokens[-1].token_id)
        start += len(block)
    batch.settle(blocks, kept, following)
    return tokens, [
        Verified(seq.seq_id, len(block) - 1, num - 1)
        for seq, block, num in zip(batch.seqs, blocks, kept, strict=True)
        if len(block) > 1
    ]


def _fill(blocks: list[list[int]], guessed: mx.array) -> None:
    """Put the drafts of the MTP head in their places. This waits for the head, and not for the pass that is running."""
    found: list[list[int]] = guessed.tolist()  # type: ignore[assignment]
    for block, drafts in zip((block for block in blocks if BY_HEAD in block), found, strict=True):
        block[1:] = drafts[: len(block) - 1]


def _num_kept(seq: Sequence, drafts: Rows[int], drawn: Rows[TokenOutput], filled: Filled | None, masks: Masks) -> int:
    """Return the number of draws that belong to the reply.

    The last one differs from its draft, ends the reply, or needs a mask that the next place did not have.
    """
    for place, token in enumerate(drawn):
        is_masked = masks.keep(seq, filled, place, token.token_id)
        if token.token_id in seq.stop_token_ids or not is_masked:
            return place + 1
        if place == len(drafts) or token.token_id != drafts[place]:
            return place + 1
    raise AssertionError("the last place has no draft")
