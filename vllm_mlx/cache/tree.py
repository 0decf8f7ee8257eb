"""The prefix cache: a tree of token runs, found by bisect, within a byte budget. It knows no mlx, clock or thread.

The number of buffers is bounded too, because a device has a limit of live buffers.

Several models and salts share one tree and one budget; each (fingerprint, salt) has its own sorted list of paths.
"""

from collections.abc import Container, Iterator
from contextlib import ExitStack

from .index import WORD_BYTES, num_tokens
from .node import Match, Node, Piece, ResumeRule, Segment, Space, State, deepest_resumable, hit_of, pinned
from .stats import Counters, Entry, TreeStats, entry_of, tree_stats
from .store import Insertion, NodeStore
from .victims import Prices, VictimQueue, Worth, evictable_bytes, is_victim, unevictable_bytes, worth, worth_of_new

_LONG_S = 1e6  # seconds by which a path that is to be evicted first counts as older
NEAR_FORK = 16  # a state at most this many tokens before a fork of paths serves the fork


class MemoryAwarePrefixCache:
    """Holds each token's KV once. Segments and states are opaque: both have a size, and segments can be split."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_buffers: int | None = None,
        s_per_token: float = 1e-3,
        min_cut: int = 256,
        worth: Worth = worth,
    ):
        """`s_per_token` are the seconds to recompute a token, of models that give no other figure.

        An eviction cuts at least `min_cut` tokens. `worth` is the rule by which nodes are weighed.
        """
        self.max_bytes = max_bytes  # `set_limit` changes it
        self._max_buffers = max_buffers or 1 << 62
        self._s_per_token = s_per_token
        self._speeds: dict[str, float] = {}  # seconds to recompute a token, by model fingerprint
        # how fast nodes with `is_copied` are read again; None if they are not
        self.read_bytes_per_s: float | None = None
        self._min_cut = min_cut
        self._worth = worth
        self.store = NodeStore()
        self.pins: dict[int, Node] = {}  # the pinned node, by Match.pin_id
        self._num_pins_made = 0
        self._now = 0.0  # the latest time that a caller has passed
        self._counters = Counters()

    def add_model(self, fingerprint: str, rule: ResumeRule, *, s_per_token: float | None = None) -> None:
        """`s_per_token` are the seconds to recompute one of its tokens. The last call counts."""
        assert self.store.rules.setdefault(fingerprint, rule) == rule, "one fingerprint, one rule"
        if s_per_token is not None or fingerprint not in self._speeds:
            self._speeds[fingerprint] = self._s_per_token if s_per_token is None else s_per_token

    def rule(self, fingerprint: str) -> ResumeRule:
        """Return the rule by which prompts of an added model can resume."""
        return self.store.rules[fingerprint]

    def s_per_token(self, fingerprint: str) -> float:
        """Return the seconds to recompute a token of a model that was added."""
        return self._speeds[fingerprint]

    @property
    def used_bytes(self) -> int:
        """Return the size of all segments, states, nodes and the index."""
        return self.store.used_bytes

    # Look-ups

    def match(self, space: Space, key: bytes, *, now: float) -> Match:
        """Find the deepest resume point on the key's path, before its last token. It is pinned until `release`."""
        self._now = max(self._now, now)
        leaf, common = self.store.nearest(space, key)
        node, length = deepest_resumable(leaf, min(common, num_tokens(key) - 1))
        if leaf is None or node is None:
            self._counters.misses += 1
            return Match(space=space, common=common)
        hit = hit_of(leaf, common, num_tokens(key))
        self._counters.count_hit(hit, length)
        self._touch(node)
        node.count_hit(self._now, is_repeated=common == num_tokens(key))
        found = Match(
            space=space,
            length=length,
            common=common,
            hit=hit,
            pieces=pieces_up_to(node, length),
            state=node.state,
            pin_id=self._num_pins_made + 1,
        )
        self._num_pins_made += 1
        self.pins[found.pin_id], self.store.matches[found.pin_id] = node, found
        node.pins += 1
        return found

    def common_length(self, space: Space, key: bytes) -> int:
        """Return the number of tokens in the longest stored prefix, resumable or not. The call changes nothing."""
        return self.store.nearest(space, key)[1]

    def resume_length(self, space: Space, key: bytes) -> int:
        """Return the position at which `match` would resume. The call changes nothing."""
        leaf, common = self.store.nearest(space, key)
        return deepest_resumable(leaf, min(common, num_tokens(key) - 1))[1]

    def path(self, space: Space, key: bytes) -> list[Node]:
        """Return the nodes that hold the longest stored prefix of the key, in order. Callers must not change them."""
        leaf, common = self.store.nearest(space, key)
        return leaf.at(common).path() if leaf is not None and common else []

    def release(self, match: Match) -> None:
        """Remove the match's pin. A second call does nothing."""
        self.store.release(match)
        node = self.pins.pop(match.pin_id, None)
        if node is not None:
            node.pins -= 1

    def touch(self, space: Space, key: bytes, *, now: float) -> None:
        """Note that the key's tokens were used by a match in another tree, which holds copies of them."""
        self._now = max(self._now, now)
        leaf, common = self.store.nearest(space, key)
        if leaf is not None and common:
            self._touch(leaf.at(common))

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
        """Store the tokens `[start, len(key))`, which continue the stored `[0, start)`. False if that is missing.

        KV that the tree already holds is dropped, unless it has KV of window layers that the tree lacks. If the key
        ends inside a stored run and a state is to be attached there, the run is split. Also returns False if no room
        can be made; nothing has changed then.
        """
        end = num_tokens(key)
        assert 0 <= start <= window_start <= end
        self._now = max(self._now, now)
        leaf, common = self.store.nearest(space, key)
        if common < start:
            self._counters.inserts_unattached += 1
            return False
        if not self.store.rules[space[0]].needs_state:
            state = None
        at = leaf.at(common) if leaf is not None and common else None
        insertion = Insertion(self.store, space=space, key=key, now=self._now)
        with ExitStack() as failing:  # a split copies, which can fail
            failing.callback(insertion.undo)
            node = insertion.put(at, common, start, segment, window_start, state)
            failing.pop_all()
        if node is not None and insertion.has_changed and not self._fit(node):
            insertion.undo()
            self._counters.inserts_refused += 1
            return False
        if node is not None:
            node.is_stored_end |= node.end == end
            self._touch(node)
        self._counters.inserts += 1
        return True

    def _fit(self, node: Node) -> bool:
        """Evict until `node`, which was just inserted, fits. Evict nothing if even that would not be enough.

        If the node has a state, earlier states on its path may be evicted. Otherwise its path depends on them.
        """
        if self._is_within(self.max_bytes):
            return True
        keep = [node] if node.state is not None else node.path()
        if unevictable_bytes([*self.pins.values(), *keep]) > self.max_bytes:
            return False
        with pinned(keep):
            self.shrink_to(self.max_bytes)
        return True

    # Room

    def make_room(self, num_bytes: int, *, after: tuple[Space, bytes] | None = None) -> bool:
        """Evict until `num_bytes` more fit. If that is impossible, evict nothing and return False.

        `after` is the key of a path that will be continued, so its stored tokens stay.
        """
        if self.max_bytes - self.used_bytes >= num_bytes:
            return True
        kept = (
            [] if after is None else [node for node in self.path(*after)[-1:] if node.end * WORD_BYTES <= len(after[1])]
        )
        if unevictable_bytes([*self.pins.values(), *kept]) + num_bytes > self.max_bytes:
            return False
        with pinned(kept):
            self.shrink_to(self.max_bytes - num_bytes)
        return True

    def is_worth(self, fingerprint: str, num_bytes: int, *, num_tokens: int, kept_bytes: int) -> bool:
        """Return whether `num_bytes` more fit once nodes go that are of less worth than new ones.

        The new ones take `kept_bytes` and save `num_tokens`. The call changes nothing.
        """
        lacking = num_bytes - self.max_bytes + self.used_bytes
        if lacking <= 0:
            return True
        limit, prices = worth_of_new(self._speeds[fingerprint] * num_tokens / max(1, kept_bytes)), self._prices
        victims = (node for node in self.store.nodes() if is_victim(node) and self._worth(node, prices) < limit)
        return lacking <= sum(map(evictable_bytes, victims))

    def retire(self, space: Space, key: bytes) -> None:
        """Let the end of this path be evicted first, unless other paths continue it."""
        leaf, common = self.store.nearest(space, key)
        if leaf is not None and leaf.end == common and not leaf.num_children:
            leaf.last_used = self._now - _LONG_S

    def shrink_to(self, num_bytes: int) -> int:
        """Evict until at most `num_bytes` are used or only pinned nodes are left. Returns the bytes in use."""
        if self._is_within(num_bytes):
            return self.used_bytes
        queue = VictimQueue(self.store.nodes(), self._prices, self._worth)
        while not self._is_within(num_bytes) and (node := queue.pop()) is not None:
            before = self.used_bytes
            if (left := self._evict(node, before - num_bytes)) is not None:
                queue.push(left)
            self._counters.evictions += 1
            self._counters.evicted_bytes += before - self.used_bytes
        return self.used_bytes

    @property
    def _prices(self) -> Prices:
        return Prices(self._now, self._speeds, self.read_bytes_per_s)

    def _is_within(self, num_bytes: int) -> bool:
        return self.used_bytes <= num_bytes and self.store.used_buffers <= self._max_buffers

    def set_limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.shrink_to(max_bytes)

    def _evict(self, node: Node, num_bytes: int) -> Node | None:
        """Free about `num_bytes` of a victim. Returns the node whose worth has changed, if any.

        If no bytes are lacking, there are too many buffers, so a leaf is removed completely.
        """
        if node.num_children:
            self.store.set_state(node, None, now=self._now)
            return None
        if node.rule.needs_state or num_bytes <= 0:
            return self._retreat(node, node.start)
        per_token = node.segment_bytes / (node.end - node.start) + WORD_BYTES
        num_cut = max(self._min_cut, int(-(-num_bytes // per_token)))
        return self._retreat(node, max(node.start, node.end - num_cut))

    def mark_copied(self, space: Space, key: bytes) -> None:
        """Note that a copy of the whole node at the key's end is kept elsewhere.

        The mark is removed when the node gets a state or other KV.
        """
        leaf, common = self.store.nearest(space, key)
        if leaf is not None and common == num_tokens(key) and (node := leaf.at(common)).end == common:
            node.is_copied = True

    # Removal for other reasons than room

    def trim(self, space: Space, key: bytes, keep: int) -> int:
        """Remove the part of this path beyond `keep` tokens, unless other paths continue it or a match pins it.

        The path then ends at its last resume point at or before `keep`. Returns the bytes freed.
        """
        leaf, common = self.store.nearest(space, key)
        before = self.used_bytes
        if leaf is not None and leaf.end == common:
            self._retreat(leaf, keep)
        return before - self.used_bytes

    def drop_state(self, space: Space, key: bytes, *, is_lost: bool = False) -> int:
        """Free the state at exactly the key's end, and tokens that can no longer be resumed without it.

        Use it for a provisional resume point. A state stays if it is pinned, or if a request has resumed from it,
        unless it `is_lost`. Returns the bytes freed.
        """
        leaf, common = self.store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or common < num_tokens(key):
            return 0
        node = leaf.at(common)
        is_free = is_lost or (not node.pins and not node.state_hits)
        if node.end == common and node.state is not None and is_free:
            self.store.set_state(node, None, now=self._now)
            self._retreat(node, node.end)
        return before - self.used_bytes

    def thin(self, space: Space, key: bytes, *, keep_last: int, keep: Container[int] = ()) -> int:
        """Free states that a growing conversation no longer needs on the key's path. Returns the bytes freed.

        These states stay: the first one (the prefix that several conversations share ends there), the last
        `keep_last`, those at the positions `keep`, the last one before a fork, and pinned ones.
        """
        leaf, common = self.store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or not common:
            return 0
        path = leaf.at(common).path()
        stateful = [node for node in path if node.state is not None and node.end <= common]
        forks = [node.end for node in path if node.num_children > 1]
        before_forks = ((max((n.end for n in stateful if n.end <= end), default=0), end) for end in forks)
        near = {point for point, end in before_forks if end - point <= NEAR_FORK}
        for node in stateful[1 : max(1, len(stateful) - keep_last)]:
            if node.end not in near and not node.pins and node.end not in keep:
                self.store.set_state(node, None, now=self._now)
        return before - self.used_bytes

    def drop(self, space: Space, key: bytes, *, start: int = 0) -> int:
        """Remove every node on the key's path that reaches beyond `start`, and all nodes after them.

        Use it for damage that a restore has found in the piece that begins at `start`. A pin does not keep a damaged
        node, because its match holds its own references. Returns the bytes freed.
        """
        leaf, common = self.store.nearest(space, key)
        before = self.used_bytes
        if leaf is None or common <= start:
            return 0
        damaged = leaf.at(start + 1)
        for other in self.store.spaces[space].under(key[: (start + 1) * WORD_BYTES]):
            if other.at(start + 1) is damaged:
                self._remove_through(other, damaged)
        self.pins = {pin_id: node for pin_id, node in self.pins.items() if node.pins}
        if damaged.parent is not None:
            self._retreat(damaged.parent, damaged.start)
        return before - self.used_bytes

    def clear(self, *, fingerprint: str | None = None, salts: str = "") -> int:
        """Remove unpinned state of one model or of all, of salts that begin with `salts`. Returns the bytes freed."""
        before = self.used_bytes
        for space, paths in list(self.store.spaces.items()):
            if fingerprint in (None, space[0]) and space[1].startswith(salts):
                for leaf in paths.leaves:
                    self._retreat(leaf, 0)
        return before - self.used_bytes

    def detach(self, *, salts: str) -> list[Node]:
        """Remove all state of salts that begin with `salts`, pinned or not, in few operations. Returns the leaves.

        Nodes are freed with the last reference to them, so the caller can spread that over time.
        """
        spaces = [space for space in self.store.spaces if space[1].startswith(salts)]
        self.pins = {pin_id: node for pin_id, node in self.pins.items() if node.space not in spaces}
        return [leaf for space in spaces for leaf in self.store.detach(space)]

    def _retreat(self, leaf: Node, limit: int) -> Node | None:
        """Cut a path back to its last resume point at or before `limit`, or to a node that others use or pin.

        Returns the node in which the path now ends; None if nothing of the path is left.
        """
        node: Node | None = leaf
        while node is not None and node.num_children == 0 and not node.pins:
            if (point := node.resumable_up_to(limit)) is not None:
                self.store.cut(node, point)
                return node
            node = self.store.remove_leaf(node)
        return node

    def _remove_through(self, leaf: Node, last: Node) -> None:
        """Remove the nodes at the end of a path that have no children, up to and including `last`, pinned or not."""
        node: Node | None = leaf
        while node is not None and node.num_children == 0:
            parent = self.store.remove_leaf(node)
            node.pins = 0
            node = parent if node is not last else None

    # Inspection

    def entries(self) -> Iterator[Entry]:
        return (entry_of(node) for node in sorted(self.store.nodes(), key=lambda node: node.node_id))

    @property
    def stats(self) -> TreeStats:
        return tree_stats(self.store, self._counters, max_bytes=self.max_bytes)


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
