"""One run of tokens in the tree. Knows its parent and how many children it has; which, only the index can tell."""

from dataclasses import dataclass

from .segment import ResumeRule, Segment, State

Space = tuple[str, str]  # (model fingerprint, salt): nothing is shared across spaces

NODE_BYTES = 512  # what Python takes for a node, its numbers and its place in the index


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """KV of the tokens `[start, end)`, after those of `parent`; perhaps a state at `end`."""

    node_id: int
    space: Space
    rule: ResumeRule
    parent: "Node | None"  # None: starts at 0
    start: int
    end: int
    segment: Segment
    segment_bytes: int
    window_start: int  # the window layers' KV is held for [window_start, end); start <= window_start <= end
    key: bytes | None = None  # the packed path; of a leaf; an inner node's begins its leaves'
    state: State | None = None
    state_bytes: int = 0
    num_children: int = 0
    pins: int = 0
    is_stored_end: bool = True  # False: made by a split only
    last_used: float = 0.0
    state_used: float = 0.0
    hits: int = 0  # requests that took its tokens
    state_hits: int = 0  # requests that resumed at its end from its state

    @property
    def size_bytes(self) -> int:
        key_bytes = len(self.key) if self.key is not None else 0
        return self.segment_bytes + self.state_bytes + key_bytes + NODE_BYTES

    @property
    def first_resumable(self) -> int:
        """No position of this run before it can be resumed at, by the window's rule; may lie beyond `end`."""
        window, held_from, node = self.rule.window, self.window_start, self
        if window is None:
            return self.start + 1
        while held_from == node.start and node.parent is not None and held_from + window > self.start + 1:
            node = node.parent
            held_from = node.window_start
        return max(self.start + 1, held_from + window if held_from else 0)

    def resumable_up_to(self, limit: int) -> int | None:
        """The last position in (start, min(end, limit)] at which a request can resume."""
        last = min(self.end, limit)
        if self.rule.needs_state and (self.state is None or last < self.end):
            return None
        return last if last >= self.first_resumable else None

    @property
    def previous_resumable(self) -> int:
        """The last resumable position at or before `start`; 0 if there is none."""
        node = self.parent
        while node is not None:
            if (point := node.resumable_up_to(node.end)) is not None:
                return point
            node = node.parent
        return 0

    def path(self) -> list["Node"]:
        """From the one that starts at 0 down to this."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def at(self, position: int) -> "Node":
        """The node of this path with `start < position <= end`."""
        node = self
        while node.start >= position:
            assert node.parent is not None
            node = node.parent
        return node

    def count_hit(self, now: float) -> None:
        """A request resumes in this node."""
        for part in self.path():
            part.hits += 1
        self.state_hits += 1
        self.state_used = now
