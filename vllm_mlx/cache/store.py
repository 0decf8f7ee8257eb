"""The nodes of a prefix tree, their index and their byte count. It knows how nodes change, but not when or why."""

from collections.abc import Iterator

from .index import WORD_BYTES, SortedPaths, num_tokens
from .node import Node, ResumeRule, Segment, Space, State


class NodeStore:
    """Every change of the tree's structure and of its byte count goes through this class."""

    def __init__(self) -> None:
        self.rules: dict[str, ResumeRule] = {}  # by model fingerprint
        self.spaces: dict[Space, SortedPaths[Node]] = {}
        self.used_bytes = 0
        self._num_made = 0

    def nearest(self, space: Space, key: bytes) -> tuple[Node | None, int]:
        """Return a leaf that shares the longest prefix with the key, and that prefix's length in tokens."""
        paths = self.spaces.get(space)
        return paths.nearest(key) if paths is not None else (None, 0)

    def nodes(self) -> Iterator[Node]:
        """Yield every node once, starting from the leaves."""
        seen: set[int] = set()
        for paths in self.spaces.values():
            for leaf in paths.leaves:
                node: Node | None = leaf
                while node is not None and node.node_id not in seen:
                    seen.add(node.node_id)
                    yield node
                    node = node.parent

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
            self.used_bytes -= len(parent.key)
            parent.key = None
        else:
            paths.add(key, leaf)
        if parent is not None:
            parent.num_children += 1
        leaf.key = key
        self.used_bytes += leaf.size_bytes
        return leaf

    def remove_leaf(self, leaf: Node) -> Node | None:
        """Remove a leaf and return its parent, which enters the index if it has no other child."""
        assert leaf.num_children == 0 and leaf.key is not None
        paths, parent, key = self.spaces[leaf.space], leaf.parent, leaf.key
        self.used_bytes -= leaf.size_bytes
        leaf.key = None
        if parent is not None:
            parent.num_children -= 1
        if parent is not None and parent.num_children == 0:
            parent.key = key[: parent.end * WORD_BYTES]
            self.used_bytes += len(parent.key)
            paths.replace(key, parent.key, parent)
        else:
            paths.remove(key)
            if not paths:
                del self.spaces[leaf.space]
        return parent

    def cut(self, leaf: Node, end: int) -> None:
        """Shorten a leaf so that it ends at `end`, with `leaf.start < end <= leaf.end`."""
        if end == leaf.end:
            return
        assert leaf.key is not None and leaf.state is None, "a leaf with a state is not cut"
        segment = leaf.segment.split(end - leaf.start)[0]  # this may fail, so it comes before any change
        self.used_bytes -= leaf.size_bytes
        key = leaf.key[: end * WORD_BYTES]
        self.spaces[leaf.space].replace(leaf.key, key, leaf)
        leaf.segment = segment
        leaf.segment_bytes = leaf.segment.nbytes
        leaf.key, leaf.end, leaf.is_stored_end = key, end, True
        leaf.window_start = min(leaf.window_start, end)
        self.used_bytes += leaf.size_bytes

    def split(self, node: Node, at: int) -> Node:
        """Split a run and return the upper node. `node` becomes the lower part and keeps its children and pins."""
        first, second = node.segment.split(at - node.start)
        upper = self._make(node.space, node.parent, node.start, at, first, min(node.window_start, at))
        upper.num_children, upper.is_stored_end = 1, False
        upper.last_used, upper.hits = node.last_used, node.hits
        self.used_bytes += upper.size_bytes - node.size_bytes
        node.parent, node.start = upper, at
        node.segment, node.segment_bytes = second, second.nbytes
        node.window_start = max(node.window_start, at)
        self.used_bytes += node.size_bytes
        return upper

    def rejoin(self, upper: Node, lower: Node, unsplit: Segment) -> None:
        """Undo a split. `unsplit` is the segment that was split."""
        self.used_bytes -= upper.size_bytes + lower.size_bytes
        lower.parent, lower.start = upper.parent, upper.start
        lower.segment, lower.segment_bytes = unsplit, unsplit.nbytes
        if lower.window_start == upper.end:
            lower.window_start = upper.window_start
        self.used_bytes += lower.size_bytes

    def set_state(self, node: Node, state: State | None, *, now: float) -> None:
        self.used_bytes -= node.state_bytes
        node.state, node.state_bytes = state, state.nbytes if state is not None else 0
        node.state_used, node.state_hits = now, 0
        self.used_bytes += node.state_bytes

    def set_segment(self, node: Node, segment: Segment, window_start: int) -> None:
        """Replace a node's KV by other KV of the same tokens."""
        self.used_bytes -= node.segment_bytes
        node.segment, node.segment_bytes, node.window_start = segment, segment.nbytes, window_start
        self.used_bytes += node.segment_bytes

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
