"""Chooses what to evict first when room is needed. It weighs nodes and changes nothing."""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .index import WORD_BYTES
from .node import NODE_BYTES, Node


def is_victim(node: Node) -> bool:
    """Whether eviction can free part of the node: a leaf's last tokens, or an inner node's state; nothing if pinned."""
    return not node.pins and (node.key is not None or (node.num_children > 0 and node.state is not None))


@dataclass(frozen=True, slots=True)
class Prices:
    """What losing nodes costs now."""

    now: float
    s_per_token: Mapping[str, float]  # seconds to recompute a token, by model fingerprint
    read_bytes_per_s: float | None = None  # at which nodes with `is_copied` come back; None: they do not


Worth = Callable[[Node, Prices], float]


def worth(node: Node, prices: Prices) -> float:
    """Seconds that the node saves per byte, times the requests that used it, divided by its age.

    One second is added to the age, so that nodes used within the same second count as equally old.
    """
    if node.num_children == 0:
        used, num_uses = node.last_used, node.hits
    else:
        used, num_uses = node.state_used, node.state_hits + node.num_children - 1
    return saved_s_per_byte(node, prices) * (1 + num_uses) / (1.0 + max(0.0, prices.now - used))


def saved_s_per_byte(node: Node, prices: Prices) -> float:
    """Seconds of recomputing what an eviction frees, or of reading it, if it is kept elsewhere and that takes less."""
    if node.num_children == 0:
        tokens = _tail_tokens(node)
        size = node.segment_bytes + node.state_bytes + NODE_BYTES + WORD_BYTES * (node.end - node.start)
    else:
        tokens, size = _state_tokens(node), node.state_bytes
    seconds = prices.s_per_token[node.space[0]] * tokens
    if node.is_copied and prices.read_bytes_per_s is not None:
        seconds = min(seconds, size / prices.read_bytes_per_s)
    return seconds / max(1, size)


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

    def __init__(self, nodes: Iterable[Node], prices: Prices, worth: Worth = worth):
        self._prices = prices
        self._weigh = worth
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
        return self._weigh(node, self._prices)


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
