"""Rules of what to keep, to set beside the tree's own: least recently used, and one that knows the requests to come."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_mlx.cache.node import Node, ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.cache.victims import Prices, saved_s_per_byte

from .recorded_sessions import Request


def least_recently_used(node: Node, prices: Prices) -> float:
    """Leaves by the last use of their path, states of inner nodes by their own."""
    return node.state_used if node.num_children else node.last_used


class Future:
    """What each path of a trace shares with each later prompt."""

    def __init__(self, requests: Sequence[Request]):
        self.times = np.array([request.at_s for request in requests])
        self.common = np.array([[one.common(other) for other in requests] for one in requests], dtype=np.int64)
        self.limits = np.array([request.num_prompt - 1 for request in requests], dtype=np.int64)


class Clairvoyant:
    """Evicts what saves the fewest seconds per byte and second until its next use.

    The next use of a node is the first later request that would resume in it, as the tree is now. What no later
    request shares is removed at once. It has all the room it wants while a request runs, so that it can choose not to
    keep what is new. This is a heuristic: the best choice is a search over all choices.
    """

    def __init__(self, future: Future):
        self.number = 0  # of the request that runs
        self._future = future
        self._tree: MemoryAwarePrefixCache | None = None
        self._seen: tuple[Prices, int] | None = None
        self._points: list[tuple[Node, int, float]] = []  # where later requests go: leaf, shared tokens, next time
        self._next: dict[int, float] = {}  # next use by node_id

    def bind(self, tree: MemoryAwarePrefixCache) -> None:
        self._tree = tree

    def begin(self, number: int) -> None:
        """A request begins. Remove what neither it nor a later one shares."""
        assert self._tree is not None
        self.number = number
        while leaves := self._leaves():
            if leaves[0].rule != ResumeRule():
                return  # what cannot be resumed now tells where prompts fork
            most = self._shared(leaves, number).max(axis=1, initial=0)
            freed = sum(
                self._tree.trim(leaf.space, leaf.key, int(keep))
                for leaf, keep in zip(leaves, most, strict=True)
                if keep < leaf.end and leaf.key is not None
            )
            if not freed:
                return

    def forks(self, number: int, start: int, end: int) -> list[int]:
        """Where later prompts leave the path of this request between `start` and `end`."""
        later = self._future.common[number, number + 1 :]
        return sorted({int(point) for point in later[(later > start) & (later < end)]})

    def __call__(self, node: Node, prices: Prices) -> float:
        assert self._tree is not None
        next_s = self._next_pass(node) if node.rule == ResumeRule() else self._next_resume(node, prices)
        return 0.0 if next_s is None else saved_s_per_byte(node, prices) / max(1.0, next_s - prices.now)

    def _next_pass(self, node: Node) -> float | None:
        """When a request shares all tokens of the node. A node ends wherever a prompt leaves its path."""
        first = self.number + 1
        passes = self._future.common[node.segment.source, first:] >= node.end  # type: ignore[attr-defined]
        return float(self._future.times[first + passes.argmax()]) if passes.any() else None

    def _next_resume(self, node: Node, prices: Prices) -> float | None:
        assert self._tree is not None
        seen = (prices, self._tree._counters.evictions)
        if self._seen is None or self._seen[0] is not prices:
            self._find_points()
            self._find_uses()
        elif self._seen[1] != seen[1]:
            self._find_uses()
        self._seen = seen
        return self._next.get(node.node_id)

    def _leaves(self) -> list[Node]:
        assert self._tree is not None
        return [leaf for paths in self._tree.store.spaces.values() for leaf in paths.leaves]

    def _shared(self, leaves: Sequence[Node], first: int) -> NDArray[np.int64]:
        """Tokens of each leaf's path that each request from the first on can resume after."""
        sources = np.array([leaf.segment.source for leaf in leaves])  # type: ignore[attr-defined]
        ends = np.array([leaf.end for leaf in leaves])
        return np.minimum(self._future.common[sources][:, first:], ends[:, None])

    def _find_points(self) -> None:
        self._points = []
        leaves, first = self._leaves(), self.number + 1
        if not leaves or first >= len(self._future.times):
            return
        shared = np.minimum(self._shared(leaves, first), self._future.limits[None, first:])
        best = shared.argmax(axis=0)
        found: set[tuple[int, int]] = set()
        for offset, at in enumerate(best.tolist()):
            point = (at, int(shared[at, offset]))
            if point[1] and point not in found:
                found.add(point)
                self._points.append((leaves[at], point[1], float(self._future.times[first + offset])))

    def _find_uses(self) -> None:
        self._next = {}
        for leaf, shared, at_s in self._points:
            node: Node | None = leaf
            while node is not None and (_is_gone(node) or node.resumable_up_to(shared) is None):
                node = node.parent
            if node is not None:
                self._next[node.node_id] = min(at_s, self._next.get(node.node_id, at_s))


def _is_gone(node: Node) -> bool:
    return node.key is None and node.num_children == 0
