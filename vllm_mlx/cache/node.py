"""One run of tokens in the tree, with the opaque state that it stores; and a match, which is the result of a look-up.

A node knows its parent and the number of its children. Only the index knows which nodes the children are. A match holds
references to the pieces that it restores, so they outlive their nodes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

Hit = Literal["exact", "prefix", "supersequence", "lcp", "miss"]
Space = tuple[str, str]  # (model fingerprint, salt); spaces share nothing

NODE_BYTES = 512  # estimated size in Python of a node and its entry in the index


class Segment(Protocol):
    """KV of a run of tokens. It is immutable and detached from any live buffer."""

    @property
    def nbytes(self) -> int: ...

    @property
    def num_buffers(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """Return the first `at` tokens and the rest, with 0 < at < length. Both own their bytes, which add up.

        Evictions split leaves too, so a split should copy little: one block, not the complete run.
        """
        ...


class State(Protocol):
    """A copy of the layers whose state cannot be divided by tokens, at one position."""

    @property
    def nbytes(self) -> int: ...

    @property
    def num_buffers(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRule:
    """The positions at which a model can resume: the strictest rule of its layers."""

    needs_state: bool = False  # recurrent layers: only at a position with a State
    window: int | None = None  # sliding-window layers: at P only if KV of [max(0, P - window), P) is stored

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0

    @property
    def resumes_anywhere(self) -> bool:
        return not self.needs_state and self.window is None


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """KV of the tokens `[start, end)`, which follow those of `parent`, and possibly a state at `end`."""

    node_id: int
    space: Space
    rule: ResumeRule
    parent: "Node | None"  # None if the run starts at 0
    start: int
    end: int
    segment: Segment
    segment_bytes: int
    window_start: int  # KV of window layers is stored for [window_start, end), start <= window_start <= end
    key: bytes | None = None  # the packed path of a leaf; an inner node has none
    state: State | None = None
    state_bytes: int = 0
    num_children: int = 0
    pins: int = 0
    is_copied: bool = False  # whether a copy of its whole content is kept elsewhere, as the copier reported
    is_stored_end: bool = True  # False if a split created this end, and no insert ended here
    last_used: float = 0.0
    state_used: float = 0.0
    forks: int = 0  # requests that matched its tokens and no further ones, or were stored completely
    has_branched: bool = False  # whether tokens have been stored after it
    hits: int = 0  # requests that resumed from its tokens
    state_hits: int = 0  # requests that resumed from its state

    @property
    def parent_id(self) -> int | None:
        return None if self.parent is None else self.parent.node_id

    @property
    def size_bytes(self) -> int:
        key_bytes = len(self.key) if self.key is not None else 0
        return self.segment_bytes + self.state_bytes + key_bytes + NODE_BYTES

    @property
    def num_buffers(self) -> int:
        """Live buffers of the device that the node holds."""
        return self.segment.num_buffers + (0 if self.state is None else self.state.num_buffers)

    @property
    def first_resumable(self) -> int:
        """Return the first position of this run at which the window rule allows resuming; it may lie beyond `end`."""
        window, held_from, node = self.rule.window, self.window_start, self
        if window is None:
            return self.start + 1
        while held_from == node.start and node.parent is not None and held_from + window > self.start + 1:
            node = node.parent
            held_from = node.window_start
        return max(self.start + 1, held_from + window if held_from else 0)

    def resumable_up_to(self, limit: int) -> int | None:
        """Return the last position in (start, min(end, limit)] at which a request can resume."""
        last = min(self.end, limit)
        if self.rule.needs_state and (self.state is None or last < self.end):
            return None
        return last if last >= self.first_resumable else None

    @property
    def previous_resumable(self) -> int:
        """The last position at or before `start` at which a request can resume; 0 if there is none."""
        return deepest_resumable(self.parent, self.start)[1]

    def path(self) -> list["Node"]:
        """Return the nodes from the one that starts at 0 down to this one."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def at(self, position: int) -> "Node":
        """Return the node on this path with `start < position <= end`."""
        node = self
        while node.start >= position:
            assert node.parent is not None
            node = node.parent
        return node

    def count_branch(self) -> bool:
        """Count a branch that is stored after it. Returns whether that is a fork: every branch but the first is one."""
        is_fork, self.has_branched = self.has_branched, True
        if is_fork:
            self._count_forks(1)
        return is_fork

    def uncount_branch(self, is_fork: bool) -> None:
        self.has_branched = is_fork
        if is_fork:
            self._count_forks(-1)

    def _count_forks(self, num: int) -> None:
        for part in self.path():
            part.forks += num

    def count_hit(self, now: float, *, is_repeated: bool) -> None:
        """Count a request that resumes in this node. `is_repeated` says whether its whole prompt is stored."""
        for part in self.path():
            part.hits += 1
        self._count_forks(int(is_repeated))
        self.state_hits += 1
        self.state_used = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """KV of the tokens `[start, end)`, of which the first `take` tokens are used."""

    segment: Any  # a Segment, which only its maker can read
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
    hit: Hit = "miss"
    pieces: tuple[Piece, ...] = ()  # they cover [0, length) without a gap
    state: State | None = None  # the state at `length`
    pin_id: int = 0  # 0 if there is no pin


def hit_of(leaf: Node, common: int, num_query: int) -> Hit:
    """Return the kind of a hit. The path of `leaf` has the first `common` of the query's `num_query` tokens.

    An identical prompt is `exact`, even if its reply is stored after it: a prompt is stored without its last token.
    """
    node = leaf.at(common)
    is_end = node.end == common and (node.is_stored_end or node.num_children == 0)
    if common < num_query:
        return "prefix" if is_end else "lcp"
    before = leaf.at(common - 1)
    is_prompt = before.end == common - 1 and before.is_stored_end
    return "exact" if is_end or is_prompt else "supersequence"


def deepest_resumable(leaf: Node | None, limit: int) -> tuple[Node | None, int]:
    """Return the last node of the leaf's path that can be resumed at or before `limit`, and that position."""
    node = leaf
    while node is not None:
        if (point := node.resumable_up_to(limit)) is not None:
            return node, point
        node = node.parent
    return None, 0


@contextmanager
def pinned(nodes: Sequence[Node]) -> Iterator[None]:
    """Protect the nodes from eviction while the block runs, also if it raises an error."""
    for node in nodes:
        node.pins += 1
    try:
        yield
    finally:
        for node in nodes:
            node.pins -= 1
