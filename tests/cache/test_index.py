"""The sorted list: the longest common prefix is a neighbour's; look-ups at memory speed; few bytes a token."""

import math
import random
import sys
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cache.fakes import SPACE, FakeState, put, resumed, segment_of, tree_of
from tests.support.rows import row
from vllm_mlx.cache.index import SortedPaths, common_tokens, num_tokens, pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

BIG_IDS = (0, 1, 255, 256, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1)


def test_packed_keys_sort_as_tuples_do() -> None:
    draw = random.Random(0)
    tuples = [tuple(draw.choice(BIG_IDS) for _ in range(draw.randrange(5))) for _ in range(500)]
    assert sorted(tuples) == sorted(tuples, key=pack)


def test_common_length_equals_a_walk_along_both() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        shared = [draw.choice(BIG_IDS) for _ in range(draw.choice((0, 1, 7, 8, 9, 500)))]
        a, b = (shared + [draw.choice(BIG_IDS) for _ in range(draw.randrange(4))] for _ in "ab")
        walk = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_tokens(pack(a), pack(b)) == walk


def test_the_nearest_path_shares_the_longest_prefix_of_all() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        drawn = {tuple(draw.randrange(3) for _ in range(draw.randrange(1, 8))) for _ in range(draw.randrange(14))}
        ends = [ids for ids in drawn if not any(other != ids and other[: len(ids)] == ids for other in drawn)]
        paths = SortedPaths[tuple[int, ...]]()
        for ids in ends:
            paths.add(pack(ids), ids)
        query = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 9)))
        found, length = paths.nearest(pack(query))
        assert length == max((common_tokens(pack(ids), pack(query)) for ids in ends), default=0)
        assert length == 0 or (found is not None and found[:length] == query[:length])


@row("S4-29")
def test_without_the_sorted_list_nothing_is_found() -> None:
    tree = tree_of(ResumeRule(needs_state=True))
    put(tree, range(10), state=FakeState(10))
    put(tree, range(20), start=10, state=FakeState(20))
    put(tree, [*range(10), 77], start=10, state=FakeState(11))
    assert resumed(tree, range(21)) == ("prefix", 20)
    for paths in tree.store.spaces.values():
        paths._keys.clear()
        paths._leaves.clear()
    assert resumed(tree, range(21)) == ("miss", 0)
    assert tree.common_length(SPACE, pack(range(10))) == 0
    assert list(tree.entries()) == []


def agent_keys(num_paths: int, length: int) -> list[bytes]:
    """Keys of conversations that share a system prompt, in families that share most of their history."""
    draw = random.Random(0)
    system = draw.randbytes(8 * (length // 3))
    history = [system + draw.randbytes(8 * (length // 2)) for _ in range(num_paths // 20)]
    starts = [history[i % len(history)][: 8 * draw.randrange(length // 3, 5 * length // 6)] for i in range(num_paths)]
    return [start + draw.randbytes(8 * length - len(start)) for start in starts]


@dataclass
class Sized:
    """A segment with nothing in it."""

    nbytes: int
    num_buffers: int = 1

    def split(self, at: int) -> "tuple[Sized, Sized]":
        return Sized(100 * at), Sized(self.nbytes - 100 * at)


def tree_of_keys(keys: list[bytes]) -> MemoryAwarePrefixCache:
    tree = tree_of(max_bytes=1 << 50)
    for key in keys:
        start = tree.common_length(SPACE, key)
        segment = Sized(100 * (num_tokens(key) - start))
        assert tree.insert(SPACE, key, start=start, segment=segment, window_start=start, state=None, now=0.0)
    return tree


def test_the_index_takes_at_most_16_bytes_a_token_and_counts_them() -> None:
    tree = tree_of_keys(agent_keys(40, 5_000))
    assert tree.stats.entry_count == 40
    assert tree.stats.index_bytes <= 16 * 40 * 5_000
    assert tree.used_bytes == tree.stats.index_bytes + sum(entry.segment_bytes for entry in tree.entries())
    keys = [key for paths in tree.store.spaces.values() for key, _ in paths]
    assert sum(map(sys.getsizeof, keys)) <= tree.stats.index_bytes


def test_the_bytes_counted_for_a_node_cover_what_python_takes() -> None:
    tree, state = tree_of(), None
    rows = [[i, *range(8)] for i in range(1000)]
    pieces = [(pack(ids), segment_of(ids, 0)) for ids in rows]
    tracemalloc.start()
    for key, segment in pieces:
        tree.insert(SPACE, key, start=0, segment=segment, window_start=0, state=state, now=1.5)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= tree.stats.index_bytes


class Counted(bytes):
    """A key that counts how often it is compared with another, and how often it is cut for that."""

    num_comparisons = 0
    num_cuts = 0

    def __gt__(self, other: bytes) -> bool:
        self.num_comparisons += 1
        return bytes(self) > other

    def __lt__(self, other: bytes) -> bool:
        self.num_comparisons += 1
        return bytes(self) < other

    def __getitem__(self, place: Any) -> Any:
        self.num_cuts += 1
        return super().__getitem__(place)


def looked_up(keys: list[bytes], length: int) -> list[Counted]:
    """Look up queries that begin as the keys do, in a tree of the keys, and return them."""
    tree = tree_of_keys(keys)
    draw = random.Random(1)
    queries = [
        Counted(draw.choice(keys)[: 8 * draw.randrange(length // 2, length)] + draw.choice((b"", bytes(80))))
        for _ in range(200)
    ]
    for query in queries:
        match = tree.match(SPACE, query, now=0.0)
        tree.release(match)
        assert match.length
    return queries


@row("S4-29")
@pytest.mark.parametrize("num_paths", [100, 1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_lookup_compares_its_key_as_often_as_a_bisection_does(num_paths: int) -> None:
    """It looks for the first difference in the two neighbours of its place alone, by bisection again."""
    length = 500
    bisection = math.ceil(math.log2(num_paths)) + 1
    queries = looked_up(agent_keys(num_paths, length), length)
    assert max(query.num_comparisons for query in queries) <= bisection
    assert max(query.num_cuts for query in queries) <= 2 * 2 * math.ceil(math.log2(8 * length))
    assert all(query.num_comparisons and query.num_cuts for query in queries)
