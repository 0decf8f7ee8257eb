"""The tree against the naive statement of its rules: random operations on tiny alphabets, compared after each."""

import random
from typing import Any

import pytest

from tests.cache.fakes import FakeSegment, FakeState, Ids, Ledger
from tests.cache.oracle import FlatCache, Found
from tests.support.integrity import check_integrity
from tests.support.rows import row
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import Match, ResumeRule, Space
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

RULES = {
    "sliceable": ResumeRule(),
    "state": ResumeRule(needs_state=True),
    "window": ResumeRule(window=3),
    "mixed": ResumeRule(needs_state=True, window=2),
}
NUM_DEFAULT, NUM_FULL, SHARES = 500, 50_000, 10


class Session:
    """One random sequence of operations on both."""

    def __init__(self, seed: int):
        self.random = draw = random.Random(seed)
        self.ledger = Ledger()
        first, second = draw.sample(sorted(RULES), 2)
        rules = {first: RULES[first], second: RULES[second]}
        budget, min_cut = draw.choice((3_000, 5_000, 8_000, 16_000)), draw.choice((1, 1, 3))
        speed = draw.choice((0.5, 0.1, 3.0))
        self.tree = MemoryAwarePrefixCache(max_bytes=budget, s_per_token=0.5, min_cut=min_cut)
        self.tree.add_model(first, rules[first])
        self.tree.add_model(second, rules[second], s_per_token=speed)
        speeds = {first: 0.5, second: speed}
        self.flat = FlatCache(max_bytes=budget, speeds=speeds, min_cut=min_cut, rules=rules)
        self.spaces: list[Space] = [(first, ""), (first, "salt"), (second, "")][: draw.choice((1, 1, 2, 3))]
        self.known: dict[Space, list[Ids]] = {space: [()] for space in self.spaces}
        self.held: list[tuple[Match, Found]] = []
        self.now = 0.0
        self.may_exceed = False  # pins can keep more than a lowered limit

    def run(self, num_operations: int) -> None:
        weighted = (
            [self.insert] * 24 + [self.match] * 20 + [self.release] * 5 + [self.trim] * 3 + [self.make_room] * 4
            + [self.shrink] * 2 + [self.drop, self.drop_state, self.set_limit, self.clear]
        )  # fmt: skip
        for _ in range(num_operations):
            self.now += self.random.choice((0.0, 0.0, 1.0, 5.0))
            self.random.choice(weighted)()
            self.compare()
        while self.held:
            self.release_at(-1)
        assert self.tree.shrink_to(0) == 0
        assert self.ledger.live_bytes == 0

    def ids(self, space: Space) -> Ids:
        """Often the beginning of a known path, with something after it."""
        base = self.random.choice(self.known[space][-8:])
        base = base[: self.random.randint(0, len(base))] if self.random.random() < 0.4 else base
        added = tuple(self.random.randrange(2) for _ in range(self.random.choice((0, 1, 2, 3, 6))))
        return (base + added)[:14] or (0,)

    def insert(self) -> None:
        space = self.random.choice(self.spaces)
        ids = self.ids(space)
        common = self.flat.table(space).common(ids)
        start = self.random.choice((*[common] * 4, self.random.randint(0, common), self.random.randint(0, len(ids))))
        window_start = self.random.choice((start, start, len(ids), self.random.randint(start, len(ids))))
        size = self.random.choice((None, 150, 150, 700, 700))
        state = FakeState(len(ids), size, self.ledger) if size is not None else None
        segment = FakeSegment(ids[start:], start, window_start, self.ledger)
        done = self.tree.insert(
            space, pack(ids), start=start, segment=segment, window_start=window_start, state=state, now=self.now
        )
        assert done == self.flat.insert(space, ids, start, window_start, size, self.now)
        self.known[space].append(ids)

    def match(self) -> None:
        space = self.random.choice(self.spaces)
        ids = self.ids(space)
        assert self.tree.common_length(space, pack(ids)) == self.flat.table(space).common(ids)
        match = self.tree.match(space, pack(ids), now=self.now)
        found = self.flat.match(space, ids, self.now)
        assert (match.hit, match.length, match.common) == (found.kind, found.length, found.common)
        check_contents(match, ids, RULES[space[0]])
        self.held.append((match, found))
        if self.random.random() < 0.7:
            self.release_at(-1)

    def release(self) -> None:
        if self.held:
            self.release_at(self.random.randrange(len(self.held)))

    def release_at(self, index: int) -> None:
        match, found = self.held.pop(index)
        self.tree.release(match)
        self.tree.release(match)
        if found.run is not None:
            found.run.pins -= 1

    def trim(self) -> None:
        space = self.random.choice(self.spaces)
        ids = self.random.choice((*self.known[space][-8:], self.ids(space)))
        keep = self.random.randint(0, len(ids))
        before = self.tree.used_bytes
        freed = self.tree.trim(space, pack(ids), keep)
        self.flat.trim(space, ids, keep)
        assert freed == before - self.tree.used_bytes

    def drop_state(self) -> None:
        space = self.random.choice(self.spaces)
        ids = self.random.choice(self.known[space][-4:])
        before = self.tree.used_bytes
        assert self.tree.drop_state(space, pack(ids)) == before - self.tree.used_bytes
        self.flat.drop_state(space, ids)

    def drop(self) -> None:
        space = self.random.choice(self.spaces)
        ids = self.ids(space)
        start = self.random.randint(0, len(ids) - 1)
        self.tree.drop(space, pack(ids), start=start)
        self.flat.drop(space, ids, start)
        assert self.tree.common_length(space, pack(ids)) <= start

    def make_room(self) -> None:
        num_bytes = self.random.randint(0, 5_000)
        assert self.tree.make_room(num_bytes) == self.flat.make_room(num_bytes)

    def shrink(self) -> None:
        num_bytes = self.random.randint(0, 12_000)
        self.tree.shrink_to(num_bytes)
        self.flat.shrink_to(num_bytes)

    def set_limit(self) -> None:
        limit = self.random.randint(2_000, 12_000)
        self.tree.set_limit(limit)
        self.flat.max_bytes = limit
        self.flat.shrink_to(limit)
        self.may_exceed = self.tree.used_bytes > limit

    def clear(self) -> None:
        fingerprint, salts = self.random.choice((*self.spaces, (None, "sa"), (self.spaces[0][0], "")))
        self.tree.clear(fingerprint=fingerprint, salts=salts)
        self.flat.clear(fingerprint, salts)

    def compare(self) -> None:
        check_integrity(self.tree)
        assert contents_of_tree(self.tree) == contents_of_oracle(self.flat)
        assert self.tree.used_bytes == self.flat.used_bytes
        self.may_exceed = self.may_exceed and self.tree.used_bytes > self.tree.max_bytes
        assert self.may_exceed or self.tree.used_bytes <= self.tree.max_bytes
        alive = {id(part): part.nbytes for part in self.parts()}
        assert self.ledger.live_bytes == sum(alive.values())

    def parts(self) -> list[Any]:
        """Segments and states in the tree, or kept by a match that is not released."""
        nodes = list(self.tree.store.nodes())
        parts: list[Any] = [part for node in nodes for part in (node.segment, node.state)]
        for match, _ in self.held:
            parts += [match.state, *(piece.segment for piece in match.pieces)]
        return [part for part in parts if part is not None]


def check_contents(match: Match, ids: Ids, rule: ResumeRule) -> None:
    """What a match gives to restore is what the query's first tokens need."""
    end, held = 0, set[int]()
    for piece in match.pieces:
        assert (piece.start, piece.segment.start) == (end, end)
        end = piece.start + piece.take
        assert piece.segment.tokens[: piece.take] == ids[piece.start : end] and end <= piece.end
        held |= set(range(piece.window_start, end))
    assert end == match.length <= len(ids) - 1
    if rule.window is not None:
        assert held >= set(range(max(0, end - rule.window), end))
    if rule.needs_state and match.length:
        assert match.state is not None and match.state.position == match.length
        assert all(piece.take == piece.end - piece.start for piece in match.pieces)


def contents_of_tree(tree: MemoryAwarePrefixCache) -> dict[Any, Any]:
    return {
        (space, key[: 8 * node.end]): (
            (node.start, node.window_start),
            node.segment_bytes,
            node.state_bytes,
            node.num_children,
            node.pins,
            node.last_used,
            (node.hits, node.forks, node.state_hits if node.state is not None else 0),
        )
        for space, paths in tree.store.spaces.items()
        for key, leaf in paths
        for node in leaf.path()
    }


def contents_of_oracle(flat: FlatCache) -> dict[Any, Any]:
    return {
        (space, pack(end)): (
            (table.run_start(end), table.window_start(end)),
            table.run_bytes(end),
            run.state_bytes or 0,
            table.num_children(end),
            run.pins,
            run.last_used,
            (run.hits, run.forks, run.state_hits if run.state_bytes is not None else 0),
        )
        for space, table in flat.tables.items()
        for end, run in table.runs.items()
    }


def play(seeds: range) -> None:
    for seed in seeds:
        try:
            Session(seed).run(num_operations=20)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@row("S4-8")
@pytest.mark.parametrize("share", range(SHARES))
def test_tree_equals_the_naive_rules(share: int) -> None:
    size = NUM_DEFAULT // SHARES
    play(range(share * size, (share + 1) * size))


@pytest.mark.full
@pytest.mark.parametrize("share", range(SHARES))
def test_tree_equals_the_naive_rules_at_length(share: int) -> None:
    size = (NUM_FULL - NUM_DEFAULT) // SHARES
    play(range(NUM_DEFAULT + share * size, NUM_DEFAULT + (share + 1) * size))
