"""Names of cached state that several ranks share: what is noted of them, and in which order."""

from tests.cache.fakes import SPACE, segment_of, tree_of
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.shared import Shared, SharedLog
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

IDS = tuple(range(20))


def stored() -> tuple[MemoryAwarePrefixCache, SharedLog, Shared]:
    """Return a tree that holds one name, and the segment of that name."""
    tree, log = tree_of(), SharedLog()
    shared = Shared(log, log.make(1), segment_of(IDS, 0))
    assert tree.insert(SPACE, pack(IDS), start=0, segment=shared, window_start=0, state=None, now=1.0)
    return tree, log, shared


def test_a_name_is_dropped_when_the_tree_drops_it_whatever_else_refers_to_it() -> None:
    tree, log, shared = stored()
    tree.trim(SPACE, pack(IDS), 8)
    elsewhere = [shared, *tree.store.held()]
    log.keep(tree.store.held())
    assert log.names == {2} and log.take() == [[1, 8, 2, 3], [1], [3]]  # split before the whole is dropped
    tree.clear()
    log.keep(tree.store.held())
    assert elsewhere and not log.names and log.take() == [[2]]


def test_the_names_of_a_match_stay_until_it_is_released() -> None:
    tree, log, _ = stored()
    match = tree.match(SPACE, pack((*IDS, 99)), now=2.0)
    tree.detach(salts="")
    log.keep(tree.store.held())
    assert match.length == 20 and log.names == {1}
    tree.release(match)
    log.keep(tree.store.held())
    assert not log.names


def test_a_segment_that_finds_no_room_has_no_name() -> None:
    tree, log, _ = stored()
    refused = Shared(log, log.make(1), segment_of(IDS[:5], 0))
    tree.set_limit(1)
    assert not tree.insert(SPACE, pack(IDS[:5]), start=0, segment=refused, window_start=0, state=None, now=3.0)
    log.keep(tree.store.held())
    assert not log.names and log.take() == [[1], [2]]
