"""The result of a look-up: the pieces to restore, in order. It holds references, so the pieces outlive their nodes."""

from dataclasses import dataclass
from typing import Literal

from .node import Node, Segment, Space, State

HitKind = Literal["exact", "prefix", "supersequence", "lcp", "miss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """KV of the tokens `[start, end)`, of which the first `take` tokens are used."""

    segment: Segment
    start: int
    end: int
    window_start: int  # the segment holds the window layers' KV of [window_start, end)
    take: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`common` tokens of the key are stored; a request can resume after the first `length` of them."""

    space: Space
    length: int = 0
    common: int = 0
    kind: HitKind = "miss"
    pieces: tuple[Piece, ...] = ()  # they cover [0, length) without a gap
    state: State | None = None  # the state at `length`
    pin_id: int = 0  # 0: no pin


def hit_kind(leaf: Node, common: int, num_query: int) -> HitKind:
    """The kind of a hit. The path of `leaf` has the first `common` of the query's `num_query` tokens."""
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
