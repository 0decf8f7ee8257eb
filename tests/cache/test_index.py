"""The sorted list: the longest common prefix is a neighbour's; look-ups at memory speed; few bytes a token."""

import random
import sys
import time
import tracemalloc
from dataclasses import dataclass

import pytest

from tests.cache.fakes import SPACE, FakeState, put, resumed, segment_of, tree_of
from tests.support.rows import row
from vllm_mlx.cache.index import SortedPaths, common_tokens, num_tokens, pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import PrefixTree

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
    for paths in tree._store.spaces.values():
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


def tree_of_keys(keys: list[bytes]) -> PrefixTree:
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
    keys = [key for paths in tree._store.spaces.values() for key, _ in paths]
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


@pytest.mark.full
def test_lookup_cost() -> None:
    """Prints p50 and p99 at 1,000 paths of 50k tokens."""
    keys = agent_keys(1_000, 50_000)
    tree = tree_of_keys(keys)
    draw = random.Random(1)
    seconds: list[float] = []
    for _ in range(2_000):
        key = draw.choice(keys)
        query = key[: 8 * draw.randrange(25_000, 50_000)] + draw.choice((b"", bytes(80)))
        begin = time.thread_time()
        match = tree.match(SPACE, query, now=0.0)
        seconds.append(time.thread_time() - begin)
        tree.release(match)
        assert match.length
    seconds.sort()
    p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    per_token = tree.stats.index_bytes / (1_000 * 50_000)
    print(f"\nlook-up p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms; index {per_token:.2f} bytes a token")
