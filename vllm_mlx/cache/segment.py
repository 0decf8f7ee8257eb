"""What the tree stores, seen from the tree: opaque parts with a size, and the rule by which a model resumes."""

from dataclasses import dataclass
from typing import Protocol, Self


class Segment(Protocol):
    """KV of a run of tokens. Immutable; detached from any live buffer."""

    @property
    def nbytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` tokens and the rest, 0 < at < length. Both own their bytes, which add up to this one's.

        Tails are cut off under memory pressure too, so a split should copy little: one block, not the whole run.
        """
        ...


class State(Protocol):
    """Copy of the layers that cannot be sliced, at one position."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRule:
    """Where a model can resume: the strictest of its layers."""

    needs_state: bool = False  # recurrent layers: only where a State is held
    window: int | None = None  # sliding-window layers: at P only if their KV of [max(0, P - window), P) is held
    can_slice: bool = True  # False: a node's KV is only usable whole, and the State carries what matters

    def __post_init__(self) -> None:
        assert self.can_slice or self.needs_state, "KV that cannot be sliced resumes only from a state"
        assert self.window is None or self.window > 0
