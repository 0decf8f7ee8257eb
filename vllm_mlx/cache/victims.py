"""Chooses what to evict first when room is needed. It weighs nodes and changes nothing."""

import heapq
from collections.abc import Iterable

from .index import WORD_BYTES
from .node import NODE_BYTES, Node


def is_victim(node: Node) -> bool:
    """Whether eviction can free part of the node: a leaf's last tokens, or an inner node's state; nothing if pinned."""
    return not node.pins and (node.key is not None or (node.num_children > 0 and node.state is not None))


def worth(node: Node, *, now: float, s_per_token: float) -> float:
    """Seconds of recomputation that the node saves per byte, times the requests that used it, divided by its age.

    One second is added to the age, so that nodes used within the same second count as equally old.
    """
    if node.num_children == 0:
        tokens, used, num_uses = _tail_tokens(node), node.last_used, node.hits
        size = node.segment_bytes + node.state_bytes + NODE_BYTES + WORD_BYTES * (node.end - node.start)
    else:
        tokens, used = _state_tokens(node), node.state_used
        size, num_uses = node.state_bytes, node.state_hits + node.num_children - 1
    return s_per_token * tokens * (1 + num_uses) / max(1, size) / (1.0 + max(0.0, now - used))


def _tail_tokens(leaf: Node) -> int:
    """Number of tokens to recompute once the leaf is evicted; 0 if no request can resume in it now."""
    if leaf.resumable_up_to(leaf.end) is None:
        return 0
    return leaf.end - (leaf.previous_resumable if leaf.rule.needs_state else leaf.start)


def _state_tokens(node: Node) -> int:
    return node.end - node.previous_resumable if node.resumable_up_to(node.end) is not None else 0


class VictimQueue:
    """Yields victims in order of ascending worth during one round of evictions.

    An eviction can raise the worth of other nodes, because the distance to the resume point before them grows: `pop`
    notices that. It can lower the worth of a node that lost its last child: the caller pushes that node again.
    """

    def __init__(self, nodes: Iterable[Node], *, now: float, s_per_token: float):
        self._now = now
        self._s_per_token = s_per_token
        self._heap = [(self._worth(node), node.node_id, node) for node in nodes if is_victim(node)]
        heapq.heapify(self._heap)

    def push(self, node: Node) -> None:
        if is_victim(node):
            heapq.heappush(self._heap, (self._worth(node), node.node_id, node))

    def pop(self) -> Node | None:
        while self._heap:
            weighed, node_id, node = heapq.heappop(self._heap)
            if not is_victim(node):
                continue
            actual = self._worth(node)
            if actual == weighed:
                return node
            if actual > weighed:
                heapq.heappush(self._heap, (actual, node_id, node))
        return None

    def _worth(self, node: Node) -> float:
        return worth(node, now=self._now, s_per_token=self._s_per_token)


def unevictable_bytes(pinned: Iterable[Node]) -> int:
    """Bytes that no eviction can free: the paths of pinned nodes, with state and key at their ends only."""
    ends = set(pinned)
    kept: set[Node] = set()
    inner: set[Node] = set()
    total = 0
    for end in ends:
        node: Node | None = end
        while node is not None and node not in kept:
            kept.add(node)
            total += node.segment_bytes + NODE_BYTES
            node = node.parent
            if node is not None:
                inner.add(node)
    total += sum(node.state_bytes for node in ends)
    return total + sum(WORD_BYTES * node.end for node in kept - inner)
