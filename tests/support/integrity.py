"""A check of a prefix cache's invariants, which every change of the tree keeps."""

from collections import Counter

from vllm_mlx.cache.index import WORD_BYTES, SortedPaths, common_tokens
from vllm_mlx.cache.node import Node, Space
from vllm_mlx.cache.tree import MemoryAwarePrefixCache


def check_integrity(tree: MemoryAwarePrefixCache) -> None:
    """Raise AssertionError that names the broken invariant."""
    store = tree.store
    nodes = list(store.nodes())
    for space, paths in store.spaces.items():
        _check_paths(space, paths)
    children = Counter(node.parent.node_id for node in nodes if node.parent is not None)
    pins = Counter(node.node_id for node in tree.pins.values())
    for node in nodes:
        _check_node(node)
        assert node.num_children == children[node.node_id], f"{_name(node)}: wrong number of children"
        assert node.pins == pins[node.node_id], f"{_name(node)}: pins and matches differ"
    assert pins.keys() <= {node.node_id for node in nodes}, "a pin on a node that is gone"
    assert store.used_bytes == sum(node.size_bytes for node in nodes), "the count of bytes is wrong"
    assert store.used_bytes == sum(store.sizes[space][0] for space in store.spaces), "a space's count of bytes is wrong"
    assert store.used_buffers == sum(node.num_buffers for node in nodes), "the count of buffers is wrong"


def _check_paths(space: Space, paths: SortedPaths[Node]) -> None:
    assert len(paths), f"{space}: an empty list is kept"
    before: tuple[bytes, Node] | None = None
    for key, leaf in paths:
        assert leaf.key is key and leaf.num_children == 0, f"{_name(leaf)}: listed and not a leaf"
        assert leaf.space == space, f"{_name(leaf)}: listed in {space}"
        assert len(key) == leaf.end * WORD_BYTES, f"{_name(leaf)}: key and end differ"
        if before is not None:
            assert before[0] < key, f"{_name(leaf)}: keys out of order"
            common = common_tokens(before[0], key)
            assert common == _shared_end(before[1], leaf), f"{_name(leaf)}: shared tokens held twice, or not shared"
        before = key, leaf


def _shared_end(a: Node, b: Node) -> int:
    """Return the end of the last node that two paths have in common."""
    ids = {node.node_id for node in a.path()}
    return max((node.end for node in b.path() if node.node_id in ids), default=0)


def _check_node(node: Node) -> None:
    parent = node.parent
    assert node.start == (parent.end if parent is not None else 0), f"{_name(node)}: does not follow its parent"
    assert node.start < node.end, f"{_name(node)}: holds no token"
    assert (node.key is None) == (node.num_children > 0), f"{_name(node)}: leaves have keys, others none"
    assert node.start <= node.window_start <= node.end, f"{_name(node)}: window outside its run"
    assert node.segment_bytes == node.segment.nbytes, f"{_name(node)}: wrong size of segment"
    assert node.state_bytes == (node.state.nbytes if node.state is not None else 0), f"{_name(node)}: wrong size"
    assert node.state is None or node.rule.needs_state, f"{_name(node)}: a state that the layers do not need"
    assert parent is None or parent.space == node.space, f"{_name(node)}: parent in another space"


def _name(node: Node) -> str:
    return f"node {node.node_id} [{node.start}, {node.end})"
