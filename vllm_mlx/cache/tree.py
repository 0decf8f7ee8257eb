"""The prefix cache: a tree of token runs found by bisect, within a budget of bytes. No mlx, no clock, no threads.

Several models and salts share one tree and one budget; each (fingerprint, salt) has its own sorted list of paths.
"""

from collections.abc import Container, Iterator
from contextlib import ExitStack

from .index import WORD_BYTES, num_tokens
from .insertion import Insertion
from .integrity import check_integrity
from .match import Match, hit_kind, pieces_up_to
from .node import Node, Space
from .segment import ResumeRule, Segment, State
from .stats import Counters, Entry, TreeStats, entry_of, tree_stats
from .store import NodeStore
from .victims import VictimQueue, unevictable_bytes

NEAR_PARTING = 16  # tokens before the place where paths part, within which a state serves it


class PrefixTree:
    """Holds each token's KV once. Segments and states are opaque: they have a size, segments can be split."""

    def __init__(self, *, max_bytes: int, s_per_token: float = 1e-3, min_cut: int = 256):
        """`s_per_token`: what recomputing a token costs; `min_cut`: tokens a tail gives up at least."""
        self._max_bytes = max_bytes
        self._s_per_token = s_per_token
        self._min_cut = min_cut
        self._store = NodeStore()
        self._pins: dict[int, Node] = {}  # by Match.pin_id
        self._num_pins_made = 0
        self._now = 0.0  # the latest seen
        self._counters = Counters()

    def add_model(self, fingerprint: str, rule: ResumeRule) -> None:
        assert self._store.rules.setdefault(fingerprint, rule) == rule, "one fingerprint, one rule"

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def used_bytes(self) -> int:
        """Segments, states, nodes and index."""
        return self._store.used_bytes

    # Look-ups

    def match(self, space: Space, key: bytes, *, now: float) -> Match:
        """The deepest resume point on the key's path, at most one token short of its end; pinned until released."""
        self._now = max(self._now, now)
        leaf, common = self._store.nearest(space, key)
        node, length = _deepest_resumable(leaf, min(common, num_tokens(key) - 1))
        if leaf is None or node is None:
            self._counters.misses += 1
            return Match(space=space, common=common)
        kind = hit_kind(leaf, common, num_tokens(key))
        self._counters.count_hit(kind, length)
        self._touch(node)
        node.count_hit(self._now)
        found = Match(
            space=space,
            length=length,
            common=common,
            kind=kind,
            pieces=pieces_up_to(node, length),
            state=node.state,
            pin_id=self._num_pins_made + 1,
        )
        self._num_pins_made += 1
        self._pins[found.pin_id] = node
        node.pins += 1
        return found

    def common_length(self, space: Space, key: bytes) -> int:
        """Tokens of the longest stored prefix, resumable or not. Changes nothing."""
        return self._store.nearest(space, key)[1]

    def release(self, match: Match) -> None:
        """Ends the match's pin; a second time does nothing."""
        node = self._pins.pop(match.pin_id, None)
        if node is not None:
            node.pins -= 1

    def _touch(self, node: Node) -> None:
        for part in node.path():
            part.last_used = self._now

    # Inserts

    def insert(
        self,
        space: Space,
        key: bytes,
        *,
        start: int,
        segment: Segment,
        window_start: int,
        state: State | None,
        now: float,
    ) -> bool:
        """Stores tokens `[start, len(key))`, which follow on the stored `[0, start)`; False if those are not there.

        What the tree already holds of them is dropped, unless it has window layers' KV that the tree lacks. A key
        that ends inside a stored run splits it, where a state is to be attached. False too if no room can be made;
        then nothing has changed.
        """
        end = num_tokens(key)
        assert 0 <= start <= window_start <= end
        self._now = max(self._now, now)
        leaf, common = self._store.nearest(space, key)
        if common < start:
            self._counters.inserts_unattached += 1
            return False
        if not self._store.rules[space[0]].needs_state:
            state = None
        at = leaf.at(common) if leaf is not None and common else None
        insertion = Insertion(self._store, space=space, key=key, now=self._now)
        with ExitStack() as failing:  # a split copies, which can fail
            failing.callback(insertion.take_back)
            node = insertion.put(at, common, start, segment, window_start, state)
            failing.pop_all()
        if node is not None and insertion.has_changed and not self._fit(node):
            insertion.take_back()
            self._counters.inserts_refused += 1
            return False
        if node is not None:
            node.is_stored_end |= node.end == end
            self._touch(node)
        self._counters.inserts += 1
        return True

    def _fit(self, node: Node) -> bool:
        """Evicts what does not fit beside `node`, just put in; nothing, if even that would not be enough.

        States on its own path may go, as any, when it brings a later one; without, they are all its path has.
        """
        if self.used_bytes <= self._max_bytes:
            return True
        keep = [node] if node.state is not None else node.path()
        if unevictable_bytes([*self._pins.values(), *keep]) > self._max_bytes:
            return False
        for part in keep:
            part.pins += 1
        self.shrink_to(self._max_bytes)
        for part in keep:
            part.pins -= 1
        return True

    # Room

    def make_room(self, num_bytes: int) -> bool:
        """Evicts until `num_bytes` more fit; False, with nothing evicted, if they cannot."""
        if self._max_bytes - self.used_bytes >= num_bytes:
            return True
        if unevictable_bytes(self._pins.values()) + num_bytes > self._max_bytes:
            return False
        self.shrink_to(self._max_bytes - num_bytes)
        return True

    def shrink_to(self, num_bytes: int) -> int:
        """Evicts until no more than `num_bytes` are used, or all that is left is pinned. Returns what is used."""
        if self.used_bytes <= num_bytes:
            return self.used_bytes
        queue = VictimQueue(self._store.nodes(), now=self._now, s_per_token=self._s_per_token)
        while self.used_bytes > num_bytes and (node := queue.pop()) is not None:
            before = self.used_bytes
            left = self._evict(node, before - num_bytes)
            if left is not None:
                queue.push(left)
            self._counters.evictions += 1
            self._counters.evicted_bytes += before - self.used_bytes
        return self.used_bytes

    def set_limit(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.shrink_to(max_bytes)

    def _evict(self, node: Node, num_bytes: int) -> Node | None:
        """Takes about `num_bytes` from a victim. Returns the node that is to be weighed anew, if any."""
        if node.num_children:
            self._store.set_state(node, None, now=self._now)
            return None
        if not node.rule.can_slice or node.rule.needs_state:
            return self._retreat(node, node.start)
        per_token = node.segment_bytes / (node.end - node.start) + WORD_BYTES
        num_cut = max(self._min_cut, int(-(-num_bytes // per_token)))
        return self._retreat(node, max(node.start, node.end - num_cut))

    # What goes for other reasons than room

    def trim(self, space: Space, key: bytes, keep: int) -> int:
        """Removes what is stored of this path beyond `keep` tokens, where nothing else is stored after it or pins it.

        Ends at a resume point: what follows the last one at or before `keep` goes too. Returns the bytes freed.
        """
        leaf, common = self._store.nearest(space, key)
        before = self.used_bytes
        if leaf is not None and leaf.end == common:
            self._retreat(leaf, keep)
        return before - self.used_bytes

    def drop_state(self, space: Space, key: bytes) -> int:
        """Frees the state at exactly the key's end, for a point that was provisional, and what only it made useful.

        Unless it is pinned, or other requests have resumed from it. Returns the bytes freed.
        """
        leaf, common = self._store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or common < num_tokens(key):
            return 0
        node = leaf.at(common)
        if node.end == common and node.state is not None and not node.pins and not node.state_hits:
            self._store.set_state(node, None, now=self._now)
            self._retreat(node, node.end)
        return before - self.used_bytes

    def thin(self, space: Space, key: bytes, *, keep_last: int, keep: Container[int] = ()) -> int:
        """Frees the states that a growing conversation has left behind on the key's path. Returns the bytes freed.

        The first stays (what several conversations share ends there), the last `keep_last`, those after `keep` tokens,
        the last before paths part, and pinned ones.
        """
        leaf, common = self._store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or not common:
            return 0
        path = leaf.at(common).path()
        stateful = [node for node in path if node.state is not None and node.end <= common]
        partings = [node.end for node in path if node.num_children > 1]
        before_partings = ((max((n.end for n in stateful if n.end <= end), default=0), end) for end in partings)
        near = {point for point, end in before_partings if end - point <= NEAR_PARTING}
        for node in stateful[1 : max(1, len(stateful) - keep_last)]:
            if node.end not in near and not node.pins and node.end not in keep:
                self._store.set_state(node, None, now=self._now)
        return before - self.used_bytes

    def drop(self, space: Space, key: bytes, *, start: int = 0) -> int:
        """Removes every node on the key's path that reaches beyond `start`, and all that follows on them.

        For damage found at restore, `start` being that of the damaged piece. Pins do not hold a damaged node: their
        matches keep what they refer to. Returns the bytes freed.
        """
        leaf, common = self._store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or common <= start:
            return 0
        damaged = leaf.at(start + 1)
        for other in self._store.spaces[space].leaves:
            if other.end > start and other.at(start + 1) is damaged:
                self._remove_through(other, damaged)
        self._pins = {pin_id: node for pin_id, node in self._pins.items() if node.pins}
        if damaged.parent is not None:
            self._retreat(damaged.parent, damaged.start)
        return before - self.used_bytes

    def clear(self, *, fingerprint: str | None = None, salts: str = "") -> int:
        """Removes all that is not pinned, of one model if given, of salts that begin so. Returns the bytes freed."""
        before = self.used_bytes
        for space, paths in list(self._store.spaces.items()):
            if fingerprint in (None, space[0]) and space[1].startswith(salts):
                for leaf in paths.leaves:
                    self._retreat(leaf, 0)
        return before - self.used_bytes

    def _retreat(self, leaf: Node, limit: int) -> Node | None:
        """Cuts a path back to its last resume point at or before `limit`, or to what others use or pin.

        Returns the node where that ended, None if nothing of the path is left.
        """
        node: Node | None = leaf
        while node is not None and node.num_children == 0 and not node.pins:
            if (point := node.resumable_up_to(limit)) is not None:
                self._store.cut(node, point)
                return node
            node = self._store.remove_leaf(node)
        return node

    def _remove_through(self, leaf: Node, last: Node) -> None:
        """Removes the childless end of a path, up to and including `last`, pinned or not."""
        node: Node | None = leaf
        while node is not None and node.num_children == 0:
            parent = self._store.remove_leaf(node)
            node.pins = 0
            node = parent if node is not last else None

    # For people and tests

    def entries(self) -> Iterator[Entry]:
        return (entry_of(node) for node in sorted(self._store.nodes(), key=lambda node: node.node_id))

    @property
    def stats(self) -> TreeStats:
        return tree_stats(self._store, self._counters, num_pinned=len(self._pins), max_bytes=self._max_bytes)

    def check_integrity(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        check_integrity(self._store, tuple(self._pins.values()))


def _deepest_resumable(leaf: Node | None, limit: int) -> tuple[Node | None, int]:
    """The last position of the leaf's path, up to `limit`, at which a request can resume, and its node."""
    node = leaf
    while node is not None:
        if (point := node.resumable_up_to(limit)) is not None:
            return node, point
        node = node.parent
    return None, 0
