"""The objects that replace a model's KV caches if the KV of the rows of a forward pass lies in groups.

A model asks a cache for a mask, hands it the new keys and values, and passes the results to
`mx.fast.scaled_dot_product_attention`. Here the results are objects, not arrays, for which that function runs once per
group (`attention.by_groups`). A model that does anything else with them raises an error at load, when it is tried
(`proofs.py`), and decodes each group in a separate forward pass.

Latent attention multiplies positional queries with the returned values, and passes the product on as a mask. Here
the product is with the identity matrix: the mask consists of these queries, and each group multiplies its own.

Tokens lie along the batch axis, one position each: `(tokens, heads, 1, width)`. So rows may have several tokens, and
not all of them equally many. Recurrent layers would take such tokens for rows. Beside them, the tokens of a row lie
along a separate axis, padded on the right to the widest row: `(rows, heads, tokens, width)`, in `BlockSpan`s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

Attend = Callable[..., mx.array]


@dataclass(frozen=True, slots=True)
class GroupMasks:
    """The masks of one layer's groups, instead of one mask."""

    masks: tuple[Any, ...]
    queries: mx.array | None = None  # latent attention: the masks apply to these, times keys
    masked: Any = None  # the score of a masked place

    def where(self, queries: mx.array, masked: mx.array) -> "GroupMasks":
        """`mx.where`, as latent attention calls it."""
        return GroupMasks(self.masks, queries, masked)


class GroupedKV:
    """Keys or values of one layer's groups, instead of one array."""

    def __init__(self, arrays: Sequence[mx.array], spans: Sequence["Span"], others: Sequence[mx.array] = ()):
        """`others` are the values that belong to keys. Latent attention uses them as positional keys."""
        self.arrays = arrays
        self._spans = spans
        self._others = others

    def swapaxes(self, first: int, second: int) -> mx.array:
        """Return the identity matrix for transposed positional keys: times queries, it leaves them unchanged."""
        if (first, second) != (-1, -2):
            raise TypeError("The model does not transpose positional keys alone")
        return mx.eye(self.arrays[0].shape[-1], dtype=self.arrays[0].dtype)

    def attend(self, attend: Attend, queries: mx.array, values: "GroupedKV", mask: Any, options: dict[str, Any]) -> Any:
        """Attention of `queries: (tokens, heads, 1, width)`, group by group. `attend` is MLX's function."""
        if values is self and mask is not None:
            masks = self._latent_masks(mask)
        elif isinstance(mask, GroupMasks) and mask.queries is None:
            masks = mask.masks
        elif mask is None and all(span.num_tokens == 1 for span in self._spans):
            masks = (None,) * len(self._spans)
        else:
            raise TypeError("The model made a mask without asking its caches")
        outputs = [
            span.joined(attend(span.of(queries), keys, own, mask=own_mask, **options))
            for span, keys, own, own_mask in zip(self._spans, self.arrays, values.arrays, masks, strict=True)
        ]
        return mx.concatenate(outputs)

    def _latent_masks(self, given: GroupMasks | mx.array) -> tuple[Any, ...]:
        """Return the scores of positional queries and keys, masked, which latent attention passes as masks."""
        if not isinstance(given, GroupMasks):
            given = GroupMasks((None,) * len(self._spans), given)
        if given.queries is None:
            raise TypeError("The model passes the masks of its caches where scores are expected")
        scores = [
            span.of(given.queries) @ keys.swapaxes(-1, -2) for span, keys in zip(self._spans, self._others, strict=True)
        ]
        return tuple(
            own if mask is None else mx.where(mask, own, given.masked)
            for mask, own in zip(given.masks, scores, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one group in a forward pass: `num_tokens` of each of its rows."""

    start: int
    num_rows: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows * self.num_tokens

    def of(self, array: mx.array) -> mx.array:
        """From (all tokens, heads, 1, width) to (rows, heads, tokens, width)."""
        own = array[self.start : self.end]
        if self.num_tokens == 1:
            return own
        _, heads, _, width = own.shape
        return own.reshape(self.num_rows, self.num_tokens, heads, width).swapaxes(1, 2)

    def joined(self, array: mx.array) -> mx.array:
        """From (rows, heads, tokens, width) to (tokens of the group, heads, 1, width)."""
        if self.num_tokens == 1:
            return array
        rows, heads, num_tokens, width = array.shape
        return array.swapaxes(1, 2).reshape(rows * num_tokens, heads, 1, width)


@dataclass(frozen=True, slots=True)
class BlockSpan(Span):
    """The tokens of one group in a block whose rows are padded on the right to `block_width`. `start` is a row."""

    block_width: int

    def of(self, array: mx.array) -> mx.array:
        """From (all rows, heads, block width, width) to (rows, heads, tokens, width), without the padding."""
        return array[self.start : self.start + self.num_rows, :, : self.num_tokens]

    def joined(self, array: mx.array) -> mx.array:
        """From (rows, heads, tokens, width) to (rows, heads, block width, width)."""
        padding = self.block_width - self.num_tokens
        return mx.pad(array, [(0, 0), (0, 0), (0, padding), (0, 0)]) if padding else array


class GroupedLayer:
    """One layer's KV cache of a forward pass. It keeps nothing itself: the KV lies in the caches of the groups."""

    def __init__(self, caches: Sequence[Any]):
        self.caches = caches
        self._spans: Sequence[Span] = ()
        self._block_width = 1
        self.offset = mx.array(0)
        self._idx = 0  # mlx-vlm takes a batch's longest length from here, and else waits for `offset`

    def begin(self, spans: Sequence[Span], offset: mx.array, longest: int, block_width: int = 1) -> None:
        """Begin a forward pass. `offset` holds the position of each token, or of the first one of each row of a block.

        `longest`: the last of these positions.
        """
        self._spans, self.offset, self._idx, self._block_width = spans, offset, longest, block_width

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return None if no group needs a mask, as is usual: its rows are equally long, and have one new token each."""
        if num_tokens != self._block_width:
            raise ValueError(f"{num_tokens} tokens along the axis of tokens, not {self._block_width}")
        masks = tuple(
            cache.make_mask(span.num_tokens, return_array=return_array, window_size=window_size)
            for cache, span in zip(self.caches, self._spans, strict=True)
        )
        return None if all(mask is None for mask in masks) else GroupMasks(masks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[GroupedKV, GroupedKV]:
        """Append new KV of shape (tokens, heads, 1, width) to each group's cache."""
        fetched = [
            cache.update_and_fetch(span.of(keys), span.of(values))
            for cache, span in zip(self.caches, self._spans, strict=True)
        ]
        own_keys, own_values = zip(*fetched, strict=True)
        return GroupedKV(own_keys, self._spans, own_values), GroupedKV(own_values, self._spans)


def held(cache: Any) -> list[mx.array]:
    """Return the buffers of a KV cache, or of all caches that an object of this file replaces."""
    caches = cache.caches if isinstance(cache, GroupedLayer) else [cache]
    return [array for each in caches for array in (each.keys, each.values)]


def spans(num_rows: Iterable[int], num_tokens: Iterable[int]) -> list[Span]:
    """Return the spans of groups, given the rows of each, and the new tokens of each of its rows."""
    found: list[Span] = []
    for rows, tokens in zip(num_rows, num_tokens, strict=True):
        found.append(Span(found[-1].end if found else 0, rows, tokens))
    return found


def block_spans(num_rows: Sequence[int], num_tokens: Iterable[int], block_width: int) -> list[Span]:
    """Return the same for a block, whose rows are padded to `block_width` tokens."""
    starts = list(accumulate(num_rows, initial=0))[:-1]
    return [
        BlockSpan(start, rows, tokens, block_width)
        for start, rows, tokens in zip(starts, num_rows, num_tokens, strict=True)
    ]
