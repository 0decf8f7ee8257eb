"""What a look-up found: the parts to restore, in order. Holds references, so they outlive their node; no mlx."""

from dataclasses import dataclass
from typing import Literal

from .node import Node, Space
from .segment import Segment, State

HitKind = Literal["exact", "prefix", "supersequence", "lcp", "miss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """KV of the tokens [start, end), of which the first `take` are used."""

    segment: Segment
    start: int
    end: int
    window_start: int  # the segment holds the window layers' KV of [window_start, end)
    take: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`length` tokens can be resumed from, of `common` that are stored."""

    space: Space
    length: int = 0
    common: int = 0
    kind: HitKind = "miss"
    pieces: tuple[Piece, ...] = ()  # from 0 to `length` without a gap
    state: State | None = None  # the one at `length`
    pin_id: int = 0  # 0: pins nothing


def hit_kind(leaf: Node, common: int, num_query: int) -> HitKind:
    """Of a hit. `leaf` is one whose path has the first `common` of the query's `num_query` tokens."""
    node = leaf.at(common)
    is_end = node.end == common and (node.is_stored_end or node.num_children == 0)
    if common == num_query:
        return "exact" if is_end else "supersequence"
    return "prefix" if is_end else "lcp"


def pieces_up_to(node: Node, length: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            segment=part.segment,
            start=part.start,
            end=part.end,
            window_start=part.window_start,
            take=min(part.end, length) - part.start,
        )
        for part in node.path()
    )
