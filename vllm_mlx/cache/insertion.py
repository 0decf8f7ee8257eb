"""One insert into the tree, and how to undo it when there is no room. It changes the store and evicts nothing."""

from collections.abc import Callable
from functools import partial

from .index import num_tokens
from .node import Node, Segment, Space, State
from .store import NodeStore


class Insertion:
    """Inserts one key's tokens, reusing the tokens that are stored already, and records how to undo each change."""

    def __init__(self, store: NodeStore, *, space: Space, key: bytes, now: float):
        self._store = store
        self._space = space
        self._key = key
        self._now = now
        self._undo_steps: list[Callable[[], object]] = []

    @property
    def has_changed(self) -> bool:
        return bool(self._undo_steps)

    def undo(self) -> None:
        while self._undo_steps:
            self._undo_steps.pop()()

    def put(
        self, node: Node | None, common: int, start: int, segment: Segment, window_start: int, state: State | None
    ) -> Node | None:
        """Put in the tokens `[start, len(key))`. The first `common` tokens of the key are stored and end in `node`.

        Returns the node in which the key now ends.
        """
        end = num_tokens(self._key)
        first, rest = _halves(segment, common - start, end - start)
        brings_state = state is not None and node is not None and (common < node.end or node.state is None)
        if node is not None and common < node.end:
            ends_here = rest is not None or brings_state or _lacks_window(node, start, common, window_start)
            node = self._split(node, common) if ends_here else node
        if node is not None and first is not None:
            self._fill_windows(node, start, common, first, window_start)
        if rest is not None:
            node = self._store.add_leaf(
                self._space,
                self._key,
                parent=node,
                segment=rest,
                window_start=max(common, window_start),
                state=state,
                now=self._now,
            )
            self._undo_steps.append(partial(self._store.remove_leaf, node))
        elif node is not None and brings_state:
            self._store.set_state(node, state, now=self._now)
            self._undo_steps.append(partial(self._store.set_state, node, None, now=self._now))
        return node

    def _split(self, node: Node, at: int) -> Node:
        unsplit = node.segment
        upper = self._store.split(node, at)
        self._undo_steps.append(partial(self._store.rejoin, upper, node, unsplit))
        return upper

    def _fill_windows(self, node: Node, start: int, end: int, segment: Segment, window_start: int) -> None:
        """Replace stored KV of `[start, end)` that lacks its window layers by the recomputed KV, which has them.

        A run in which `start` lies is left alone: the row was resumed from its window.
        """
        runs = [run for run in node.path() if run.end <= end and _lacks_window(run, start, run.end, window_start)]
        for run in reversed(runs):
            segment = _halves(segment, run.end - start, end - start)[0] or segment
            before, part = _halves(segment, run.start - start, run.end - start)
            assert part is not None
            self._undo_steps.append(partial(self._store.set_segment, run, run.segment, run.window_start))
            self._store.set_segment(run, part, max(run.start, window_start))
            if before is None:
                return
            segment, end = before, run.start


def _halves(segment: Segment, at: int, length: int) -> tuple[Segment | None, Segment | None]:
    if at == 0:
        return None, segment if length else None
    return (segment, None) if at == length else segment.split(at)


def _lacks_window(node: Node, start: int, end: int, window_start: int) -> bool:
    """Whether KV from `start` on, with windows from `window_start` on, has windows that `[node.start, end)` lacks."""
    if node.rule.window is None or node.start < start:
        return False
    return min(node.window_start, end) > max(node.start, window_start)
