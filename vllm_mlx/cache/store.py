"""Every change of a prefix tree's nodes, index and byte count.

This module evicts nothing, and does not know when or why nodes change.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import ParamSpec

from .index import WORD_BYTES, SortedPaths, num_tokens
from .node import Match, Node, ResumeRule, Segment, Space, State

P = ParamSpec("P")


class NodeStore:
    """Every change of the tree's structure and of its byte count goes through this class."""

    def __init__(self) -> None:
        self.rules: dict[str, ResumeRule] = {}  # by model fingerprint
        self.spaces: dict[Space, SortedPaths[Node]] = {}
        self.used_bytes = 0
        self.used_buffers = 0
        self.matches: dict[int, Match] = {}  # those that are not released, by Match.pin_id
        self.num_changes = 0  # after each release, `held` may yield less
        self.sizes: dict[Space, list[int]] = {}  # bytes and buffers of each space
        self._num_made = 0

    def nearest(self, space: Space, key: bytes) -> tuple[Node | None, int]:
        """Return a leaf that shares the longest prefix with the key, and that prefix's length in tokens."""
        paths = self.spaces.get(space)
        return paths.nearest(key) if paths is not None else (None, 0)

    def nodes(self) -> Iterator[Node]:
        """Yield every node once, starting from the leaves. The tree may change meanwhile."""
        seen: set[int] = set()
        for paths in list(self.spaces.values()):
            for leaf in paths.leaves:
                node: Node | None = leaf
                while node is not None and node.node_id not in seen:
                    seen.add(node.node_id)
                    yield node
                    node = node.parent

    def held(self) -> Iterator[Segment | State]:
        """Yield the segments and states of all nodes and matches. Others are not used any more."""
        nodes, matches = list(self.nodes()), self.matches.values()
        yield from (node.segment for node in nodes)
        yield from (piece.segment for match in matches for piece in match.pieces)
        yield from (state for state in (*(n.state for n in nodes), *(m.state for m in matches)) if state is not None)

    def release(self, match: Match) -> None:
        """Forget a match, whose pieces the nodes may not hold any more."""
        self.num_changes += self.matches.pop(match.pin_id, None) is not None

    def detach(self, space: Space) -> list[Node]:
        """Remove all paths of a space in one operation. Returns the leaves; nodes go with their last reference."""
        self.num_changes += 1
        num_bytes, num_buffers = self.sizes.pop(space)
        self.used_bytes -= num_bytes
        self.used_buffers -= num_buffers
        return list(self.spaces.pop(space).leaves)

    def add_leaf(
        self,
        space: Space,
        key: bytes,
        *,
        parent: Node | None,
        segment: Segment,
        window_start: int,
        state: State | None,
        now: float,
    ) -> Node:
        """Add a leaf after `parent`. A parent that was a leaf leaves the index."""
        start = parent.end if parent is not None else 0
        leaf = self._make(space, parent, start, num_tokens(key), segment, window_start)
        leaf.last_used = leaf.state_used = now
        leaf.state, leaf.state_bytes = state, state.nbytes if state is not None else 0
        paths = self.spaces.setdefault(space, SortedPaths())
        if parent is not None and parent.key is not None:
            paths.replace(parent.key, key, leaf)
            self._add(space, -len(parent.key), 0)
            parent.key = None
        else:
            paths.add(key, leaf)
        if parent is not None:
            parent.num_children += 1
        leaf.key = key
        self._count(leaf)
        return leaf

    def remove_leaf(self, leaf: Node) -> Node | None:
        """Remove a leaf and return its parent, which enters the index if it has no other child."""
        assert leaf.num_children == 0 and leaf.key is not None
        paths, parent, key = self.spaces[leaf.space], leaf.parent, leaf.key
        self._discount(leaf)
        leaf.key = None
        if parent is not None:
            parent.num_children -= 1
        if parent is not None and parent.num_children == 0:
            parent.key = key[: parent.end * WORD_BYTES]
            self._add(leaf.space, len(parent.key), 0)
            paths.replace(key, parent.key, parent)
        else:
            paths.remove(key)
            if not paths:
                del self.spaces[leaf.space], self.sizes[leaf.space]
        return parent

    def cut(self, leaf: Node, end: int) -> None:
        """Shorten a leaf so that it ends at `end`, with `leaf.start < end <= leaf.end`."""
        if end == leaf.end:
            return
        assert leaf.key is not None and leaf.state is None, "a leaf with a state is not cut"
        segment = leaf.segment.split(end - leaf.start)[0]  # this may fail, so it comes before any change
        self._discount(leaf)
        key = leaf.key[: end * WORD_BYTES]
        self.spaces[leaf.space].replace(leaf.key, key, leaf)
        leaf.segment = segment
        leaf.segment_bytes = leaf.segment.nbytes
        leaf.key, leaf.end, leaf.is_stored_end = key, end, True
        leaf.window_start = min(leaf.window_start, end)
        self._count(leaf)

    def split(self, node: Node, at: int) -> Node:
        """Split a run and return the upper node. `node` becomes the lower part and keeps its children and pins."""
        first, second = node.segment.split(at - node.start)
        self._discount(node)
        upper = self._make(node.space, node.parent, node.start, at, first, min(node.window_start, at))
        upper.num_children, upper.is_stored_end = 1, False
        upper.last_used, upper.hits, upper.is_copied = node.last_used, node.hits, node.is_copied
        upper.forks, upper.has_branched = node.forks, True
        node.parent, node.start = upper, at
        node.segment, node.segment_bytes = second, second.nbytes
        node.window_start = max(node.window_start, at)
        self._count(upper)
        self._count(node)
        return upper

    def rejoin(self, upper: Node, lower: Node, unsplit: Segment) -> None:
        """Undo a split. `unsplit` is the original segment."""
        self._discount(upper)
        self._discount(lower)
        lower.parent, lower.start = upper.parent, upper.start
        lower.segment, lower.segment_bytes = unsplit, unsplit.nbytes
        if lower.window_start == upper.end:
            lower.window_start = upper.window_start
        self._count(lower)

    def set_state(self, node: Node, state: State | None, *, now: float) -> None:
        self._discount(node, drops=node.state is not None)
        node.state, node.state_bytes = state, state.nbytes if state is not None else 0
        node.state_used, node.state_hits = now, 0
        node.is_copied &= state is None
        self._count(node)

    def set_segment(self, node: Node, segment: Segment, window_start: int) -> None:
        """Replace a node's KV by other KV of the same tokens."""
        self._discount(node)
        node.segment, node.segment_bytes, node.window_start = segment, segment.nbytes, window_start
        node.is_copied = False
        self._count(node)

    def _count(self, node: Node) -> None:
        self._add(node.space, node.size_bytes, node.num_buffers)

    def _discount(self, node: Node, *, drops: bool = True) -> None:
        """Subtract the node before it changes; `drops`: the change may remove a part of its state from the tree."""
        self.num_changes += drops
        self._add(node.space, -node.size_bytes, -node.num_buffers)

    def _add(self, space: Space, num_bytes: int, num_buffers: int) -> None:
        self.used_bytes += num_bytes
        self.used_buffers += num_buffers
        size = self.sizes.setdefault(space, [0, 0])
        size[0] += num_bytes
        size[1] += num_buffers

    def _make(
        self, space: Space, parent: Node | None, start: int, end: int, segment: Segment, window_start: int
    ) -> Node:
        self._num_made += 1
        return Node(
            node_id=self._num_made,
            space=space,
            rule=self.rules[space[0]],
            parent=parent,
            start=start,
            end=end,
            segment=segment,
            segment_bytes=segment.nbytes,
            window_start=window_start,
        )


class Insertion:
    """Inserts one key's tokens, reusing the tokens that are stored already, and records how to undo each change.

    The insertion is undone if the segment does not fit. It evicts nothing itself.
    """

    def __init__(self, store: NodeStore, *, space: Space, key: bytes, now: float):
        self._store = store
        self._space = space
        self._key = key
        self._now = now
        self._undo = ExitStack()
        self.has_changed = False

    def _note(self, undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._undo.callback(undo, *args, **kwargs)
        self.has_changed = True

    def undo(self) -> None:
        self._undo.close()
        self.has_changed = False

    def put(
        self, node: Node | None, common: int, start: int, segment: Segment, window_start: int, state: State | None
    ) -> Node | None:
        """Insert the tokens `[start, len(key))`. The first `common` tokens of the key are stored, and end in `node`.

        Returns the node in which the key now ends.
        """
        end = num_tokens(self._key)
        first, rest = _halves(segment, common - start, end - start)
        brings_state = state is not None and node is not None and (common < node.end or node.state is None)
        if node is not None and common < node.end:
            ends_here = rest is not None or brings_state or _lacks_window(node, common, window_start)
            node = self._split(node, common) if ends_here else node
        if node is not None and first is not None:
            self._fill_windows(node, start, common, first, window_start)
        if rest is not None:
            if node is not None:
                self._note(node.uncount_branch, node.count_branch())
            node = self._store.add_leaf(
                self._space,
                self._key,
                parent=node,
                segment=rest,
                window_start=max(common, window_start),
                state=state,
                now=self._now,
            )
            self._note(self._store.remove_leaf, node)
        elif node is not None and brings_state:
            self._store.set_state(node, state, now=self._now)
            self._note(self._store.set_state, node, None, now=self._now)
        return node

    def _split(self, node: Node, at: int) -> Node:
        unsplit = node.segment
        upper = self._store.split(node, at)
        self._note(self._store.rejoin, upper, node, unsplit)
        return upper

    def _fill_windows(self, node: Node, start: int, end: int, segment: Segment, window_start: int) -> None:
        """Replace stored KV of `[start, end)` that lacks window layers by the recomputed KV, which has them.

        A run that begins before `start` is split where the windows begin.
        """
        runs = [run for run in node.path() if run.end <= end and _lacks_window(run, run.end, window_start)]
        for run in reversed(runs):
            if run.start < start:
                self._split(run, window_start)
            segment = _halves(segment, run.end - start, end - start)[0] or segment
            before, part = _halves(segment, run.start - start, run.end - start)
            assert part is not None
            self._note(self._store.set_segment, run, run.segment, run.window_start)
            self._store.set_segment(run, part, max(run.start, window_start))
            if before is None:
                return
            segment, end = before, run.start


def _halves(segment: Segment, at: int, length: int) -> tuple[Segment | None, Segment | None]:
    if at == 0:
        return None, segment if length else None
    return (segment, None) if at == length else segment.split(at)


def _lacks_window(node: Node, end: int, window_start: int) -> bool:
    """Return whether KV with windows from `window_start` on has windows that `[node.start, end)` lacks."""
    return node.rule.window is not None and min(node.window_start, end) > max(node.start, window_start)
