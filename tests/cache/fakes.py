"""Segments and states with known sizes, that know their tokens and count the bytes alive. No mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.integrity import check_integrity
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule, Space
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

Ids = tuple[int, ...]
WINDOW_BYTES = 40  # what a token takes more, where its window KV is held


def token_bytes(token: int) -> int:
    return 60 + 7 * (token % 97)


@dataclass
class Ledger:
    live_bytes: int = 0


@dataclass(eq=False)
class FakeSegment:
    tokens: Ids
    start: int
    window_start: int  # absolute
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.nbytes = sum(map(token_bytes, self.tokens)) + WINDOW_BYTES * (
            self.start + len(self.tokens) - self.window_start
        )
        self.num_buffers = 1 + (self.window_start < self.start + len(self.tokens))
        self.ledger.live_bytes += self.nbytes

    def __del__(self) -> None:
        self.ledger.live_bytes -= self.nbytes

    def split(self, at: int) -> "tuple[FakeSegment, FakeSegment]":
        assert 0 < at < len(self.tokens)
        middle = self.start + at
        return (
            FakeSegment(self.tokens[:at], self.start, min(self.window_start, middle), self.ledger),
            FakeSegment(self.tokens[at:], middle, max(self.window_start, middle), self.ledger),
        )


@dataclass(eq=False)
class FakeState:
    position: int
    nbytes: int = 700
    ledger: Ledger = field(default_factory=Ledger)
    num_buffers: int = 2

    def __post_init__(self) -> None:
        self.ledger.live_bytes += self.nbytes

    def __del__(self) -> None:
        self.ledger.live_bytes -= self.nbytes


def segment_of(ids: Sequence[int], start: int, window_start: int | None = None) -> FakeSegment:
    return FakeSegment(tuple(ids[start:]), start, start if window_start is None else window_start)


SPACE: Space = ("model", "")


def tree_of(rule: ResumeRule = ResumeRule(), *, max_bytes: int = 1 << 30, min_cut: int = 1) -> MemoryAwarePrefixCache:  # noqa: B008
    tree = MemoryAwarePrefixCache(max_bytes=max_bytes, min_cut=min_cut)
    tree.add_model("model", rule)
    return tree


def put(
    tree: MemoryAwarePrefixCache,
    ids: Sequence[int],
    *,
    start: int = 0,
    state: FakeState | None = None,
    window_start: int | None = None,
    now: float = 0.0,
    space: Space = SPACE,
) -> bool:
    window_start = start if window_start is None else window_start
    segment = segment_of(ids, start, window_start)
    done = tree.insert(space, pack(ids), start=start, segment=segment, window_start=window_start, state=state, now=now)
    check_integrity(tree)
    return done


def resumed(
    tree: MemoryAwarePrefixCache, ids: Sequence[int], *, now: float = 0.0, space: Space = SPACE
) -> tuple[str, int]:
    """Kind and length of a look-up that pins nothing afterwards."""
    match = tree.match(space, pack(ids), now=now)
    tree.release(match)
    return match.hit, match.length
