"""Chooses the node to evict first when room is needed. It weighs nodes and changes nothing."""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .index import WORD_BYTES
from .node import NODE_BYTES, Node

_SOON_S = 60.0  # about when the next request of a conversation that continues arrives
_FORK_SHARE = 0.05  # weight of a fork, relative to a conversation that continues
_SHARED_TOKENS = 4096  # typical length of a beginning that conversations share
_RETRIES = 0.1  # share of requests that branch off before the end of their conversation


def is_victim(node: Node) -> bool:
    """Return whether eviction can free a leaf's last tokens or a state inside the tree. A pin prevents both."""
    return not node.pins and (node.key is not None or (node.num_children > 0 and node.state is not None))


@dataclass(frozen=True, slots=True)
class Prices:
    """The present costs of losing nodes."""

    now: float
    s_per_token: Mapping[str, float]  # seconds to recompute a token, by model fingerprint
    read_bytes_per_s: float | None = None  # how fast nodes with `is_copied` are read again; None if they cannot be


Worth = Callable[[Node, Prices], float]


def worth(node: Node, prices: Prices) -> float:
    """Seconds that the node saves per byte, times the chance that it is used soon.

    A conversation that continues does so soon: that chance falls with the square of the age. Another conversation may
    begin in the same way at any time: that chance falls with the age itself, and grows with the forks that were seen.
    A first fork is expected as well, more of a short beginning than of a long one. An inner state serves forks and
    retries.
    """
    if node.num_children == 0:
        used, forks, continues = node.last_used, node.forks, 1.0
    else:
        used, forks, continues = node.state_used, node.num_children - 1, _RETRIES
    age = _SOON_S + max(0.0, prices.now - used)
    expected = forks + _SHARED_TOKENS / (_SHARED_TOKENS + node.end)
    return saved_s_per_byte(node, prices) * (continues * _SOON_S / age + _FORK_SHARE * expected) / age


def worth_of_new(saved_s: float) -> float:
    """Return the worth of nodes that a conversation uses now and that save `saved_s` seconds per byte."""
    return saved_s / _SOON_S


def evictable_bytes(node: Node) -> int:
    """Return bytes that an eviction of the node frees: of a leaf, or of the state of an inner node."""
    if node.num_children:
        return node.state_bytes
    return node.segment_bytes + node.state_bytes + NODE_BYTES + WORD_BYTES * (node.end - node.start)


def saved_s_per_byte(node: Node, prices: Prices) -> float:
    """Seconds to recompute the state that an eviction frees, or to read a copy if that is faster."""
    size = evictable_bytes(node)
    seconds = prices.s_per_token[node.space[0]] * _lost_tokens(node)
    if node.is_copied and prices.read_bytes_per_s is not None:
        seconds = min(seconds, size / prices.read_bytes_per_s)
    return seconds / max(1, size)


def _lost_tokens(node: Node) -> int:
    """Return the number of tokens to recompute after an eviction. It is 0 if no request can resume in the node now."""
    if node.resumable_up_to(node.end) is None:
        return 0
    return node.end - (node.start if node.rule.resumes_anywhere else node.previous_resumable)


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
    """Return bytes that no eviction can free: the paths of pinned nodes, with state and key at their ends only."""
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
