"""Plans the use of the prefix cache: where a sequence resumes, and where its state is worth storing.

This is one model's view of the shared tree. It is pure: state is opaque here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..cache.index import WORD_BYTES, common_tokens, pack
from ..cache.node import NODE_BYTES, Match, ResumeRule, Space
from ..cache.tree import NEAR_FORK, MemoryAwarePrefixCache
from ..core.memory import RowFootprint
from ..core.receipt import CacheReceipt
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import Capture, Restore, Snapshot
from ..util.faults import device_fault
from ..util.fence import RowFence

if TYPE_CHECKING:  # it knows arrays of mlx
    from ..disk.tier import DiskTier

T = TypeVar("T")

_MIN_GAIN = 256  # tokens that a snapshot before a fork of two prompts must save, at least
_STATES_OF_A_CONVERSATION = 4  # newest snapshots kept on one path: those of this turn and of the last one
MIN_SHARED_TOKENS = 32  # waiting for another prefill to share fewer tokens costs more than it saves


class PrefixPlanner:
    """Owns the plans of all sequences for the cache, and the pins of the restores of one step."""

    def __init__(
        self,
        tree: MemoryAwarePrefixCache,
        fingerprint: str,
        rule: ResumeRule,
        footprint: RowFootprint,
        *,
        max_bytes: int,
        snapshot_every: int,
    ):
        self.tree = tree
        self.fingerprint = fingerprint
        self._rule = rule
        self._resumes_anywhere = rule.resumes_anywhere
        self._footprint = footprint
        self._max_bytes = max_bytes
        self._snapshot_every = snapshot_every
        self._keys: dict[int, bytes] = {}  # seq_id -> packed prompt
        self._points: dict[int, set[int]] = {}  # seq_id -> token counts at which prefill stops for a capture
        self._lattice: dict[int, set[int]] = {}  # seq_id -> the points that only serve after an abort
        self._planned: dict[int, int] = {}  # id of a planned capture -> bytes that it will take
        self._capture_soon: set[int] = set()  # seq_ids whose next chunk is captured in any case
        self._open_matches: list[Match] = []  # pinned for the restores of the running step
        self._trims: list[tuple[Sequence, int]] = []  # (sequence, tokens to keep)
        self._unusable: set[int] = set()  # seq_ids whose match was damaged: they start without the cache
        self._fault: RuntimeError | None = None
        self.num_skipped_captures = 0  # because memory was short
        self.disk: DiskTier | None = None  # set by the engine, if there is one
        tree.add_model(fingerprint, rule)

    def open(self, seq: Sequence) -> None:
        self._keys[seq.seq_id] = pack(seq.key())

    def prompt_key(self, seq: Sequence) -> bytes:
        """Return the packed prompt of a sequence that waits or runs."""
        return self._keys[seq.seq_id]

    def close(self, seq: Sequence) -> None:
        self._keys.pop(seq.seq_id, None)
        self._points.pop(seq.seq_id, None)
        self._lattice.pop(seq.seq_id, None)
        self._capture_soon.discard(seq.seq_id)
        self._unusable.discard(seq.seq_id)
        if self.disk is not None:
            self.disk.reader.forget(seq.seq_id)

    @property
    def seq_ids(self) -> list[int]:
        """Return all sequences that wait or run."""
        return list(self._keys)

    @property
    def held_bytes(self) -> int:
        """Return bytes of cached state, and of running reads."""
        return self.tree.used_bytes + (0 if self.disk is None else self.disk.reader.reserved_bytes)

    @property
    def is_reading(self) -> bool:
        return self.disk is not None and bool(self.disk.reader.reading)

    def awaits_read(self, seq: Sequence) -> bool:
        """Return whether a sequence should wait, because a longer prefix than memory holds is being read from disk."""
        if self.disk is None or seq.seq_id in self._unusable or not seq.is_scored:
            return False
        return self.disk.reader.awaits(seq.seq_id, self._space(seq), self._key(seq, seq.num_tokens))

    def resume(self, seq: Sequence, now: float) -> Restore | None:
        """Resume at the deepest stored point of prompt and reply, and plan the captures on the way.

        Returns None if the sequence starts at its first token.
        """
        seq.num_computed_tokens = 0
        receipt = CacheReceipt(cache_bytes=self.tree.used_bytes, max_cache_bytes=self.tree.max_bytes)
        if not seq.num_preemptions:
            seq.receipt = receipt
        match = None if seq.seq_id in self._unusable or not seq.is_scored else self._match(seq, now)
        if match is None:
            self.plan_points(seq)
            return None
        self._open_matches.append(match)  # released with the others also if the rest fails
        seq.num_computed_tokens = match.length
        common, num_read = match.common, 0
        if self.disk is not None:
            key = self._key(seq, seq.num_tokens)
            common = max(common, self.disk.tree.common_length(match.space, key))
            num_read = self.disk.reader.resumed(seq.seq_id, match.space, key[: match.length * WORD_BYTES])
        if not seq.num_preemptions:
            num_cached = min(match.length, seq.num_prompt_tokens)
            seq.receipt = replace(
                receipt,
                cached_tokens=num_cached,
                stored_tokens=min(common, seq.num_prompt_tokens),
                disk_tokens=min(num_read, num_cached),
                hit=match.hit,
            )
        self.plan_points(seq, common)
        return Restore(seq, match) if match.length else None

    def _match(self, seq: Sequence, now: float) -> Match | None:
        with self._fenced(num_captures=0):
            return self.tree.match(self._space(seq), self._key(seq, seq.num_tokens), now=now)
        return None

    def release_matches(self) -> None:
        """Remove the pins of this step's restores. The runner has done them, or they will not happen."""
        while self._open_matches:
            self.tree.release(self._open_matches.pop())

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Once `seq` has ended, remove its stored state beyond `num_tokens`, unless other paths share it."""
        self._trims.append((seq, num_tokens))

    @property
    def has_trims(self) -> bool:
        return bool(self._trims)

    def trim_ended(self) -> None:
        """Remove state that no later turn can use, once it is stored and no planned capture continues it."""
        if self._planned:
            return
        trims, self._trims = self._trims, []
        for seq, num_tokens in trims:
            if seq.status is not SequenceStatus.FINISHED:
                self._trims.append((seq, num_tokens))
            elif seq.num_tokens > num_tokens:
                with self._hold_fault():
                    key = pack(seq.key())
                    for tree in self._trees:
                        tree.trim(self._space(seq), key, num_tokens)

    def retire(self, seq: Sequence, key: bytes) -> None:
        """Let the end of a path go first, since the next turn of its conversation takes another."""
        self.tree.retire(self._space(seq), key)

    def drop(self, match: Match, seq: Sequence) -> None:
        """Remove a damaged path. The sequence continues without the cache."""
        self._unusable.add(seq.seq_id)
        with self._hold_fault():
            for tree in self._trees:
                tree.drop(match.space, self._key(seq, match.length))

    def plan_points(self, seq: Sequence, num_common: int = 0) -> None:
        """Decide where the prefill of this sequence stops for a capture.

        `num_common` of its tokens are stored, perhaps more than it could resume from. A third prompt is likely to fork
        where two prompts do, so a capture is planned a little before that place: different texts may begin with the
        same tokens.
        """
        start, end, every = seq.num_computed_tokens, min(seq.prefill_end, seq.max_stored), self._snapshot_every
        points = {end}
        if not self._resumes_anywhere:
            points.update(seq.prompt.snapshot_points)
            fork = num_common - NEAR_FORK
            if fork - start >= _MIN_GAIN and all(abs(fork - point) >= NEAR_FORK for point in points):
                points.add(fork)
        if every:
            lattice = set(range(start + every, end - every // 2, every)) - points
            self._lattice[seq.seq_id] = lattice
            points |= lattice
        self._points[seq.seq_id] = {point for point in points if start < point <= end}

    def next_point(self, seq: Sequence) -> int:
        """Position at which the next chunk must end at the latest."""
        ahead = [point for point in self._points.get(seq.seq_id, ()) if point > seq.num_computed_tokens]
        return min(ahead, default=seq.prefill_end)

    def plan_chunk_capture(self, seq: Sequence, end: int) -> Capture | None:
        """Plan the capture after a chunk that ends at `end`, if one is due."""
        if end not in self._points.get(seq.seq_id, ()) and seq.seq_id not in self._capture_soon:
            return None
        self._capture_soon.discard(seq.seq_id)
        return self.plan_capture(seq, end)

    def plan_capture(self, seq: Sequence, row_length: int) -> Capture | None:
        """Plan a copy of the state that the tree lacks, or of a part if memory is short and the state can be divided.

        Returns None if the tree lacks nothing or memory is short. Room is made before memory is used.
        """
        with self._fenced():
            return self._plan_capture(seq, row_length)
        return None

    def _plan_capture(self, seq: Sequence, row_length: int) -> Capture | None:
        end = min(row_length, seq.max_stored)
        if end <= 0 or (end < row_length and not self._resumes_anywhere):
            return None
        key, space = self._key(seq, end), self._space(seq)
        start = min(self.tree.common_length(space, key), end)
        if start == end and not self._rule.needs_state:
            return None
        overhead = NODE_BYTES + WORD_BYTES * end
        promised = sum(self._planned.values())
        copied = self._footprint.copy_bytes(end - start, end)
        enough = self.tree.make_room(copied + overhead + promised, after=(space, key))
        start = min(self.tree.common_length(space, key), end)  # making room may have evicted some of it
        if not enough:
            room = self.tree.max_bytes - self.tree.used_bytes - overhead - promised
            end = start + room // self._footprint.bytes_per_token if self._resumes_anywhere else start
            if end - start < MIN_SHARED_TOKENS:
                self.num_skipped_captures += 1
                return None
        capture = Capture(seq, start, end, row_length, key[: end * WORD_BYTES])
        self._planned[id(capture)] = self._footprint.copy_bytes(end - start, end) + overhead
        return capture

    def forget_planned(self, but: Iterable[Capture] = ()) -> None:
        """Forget the captures that were planned for a step that is over, whether they were made or not."""
        staying = {id(capture) for capture in but}
        self._planned = {key: size for key, size in self._planned.items() if key in staying}

    def insert(self, snapshot: Snapshot, now: float) -> bool:
        """Store a snapshot. Returns False if it is not stored. The row continues in any case."""
        self._planned.pop(id(snapshot.capture), None)
        with self._fenced():
            return self._insert(snapshot, now)
        return False

    def raise_fault(self) -> None:
        """Raise the device fault that an earlier change of cached state met."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if self.disk is not None:
            self.disk.store.raise_fault()

    @contextmanager
    def _hold_fault(self) -> Iterator[None]:
        """Keep a device fault for `raise_fault`. Copies that fail leave the tree as it was."""
        try:
            yield
        except RuntimeError as error:
            if device_fault(error) is None:
                raise
            self._fault = error

    @contextmanager
    def _fenced(self, *, num_captures: int = 1) -> Iterator[None]:
        """Contain an error of the block, which then skips `num_captures` captures."""
        with self._hold_fault(), RowFence("the row, which goes on without the prefix cache"):
            yield
            return
        self.num_skipped_captures += num_captures

    def _insert(self, snapshot: Snapshot, now: float) -> bool:
        capture, space = snapshot.capture, self._space(snapshot.capture.seq)
        is_stored = self.tree.insert(
            space,
            capture.key,
            start=capture.start,
            segment=snapshot.segment,
            window_start=snapshot.window_start,
            state=snapshot.state,
            now=now,
        )
        if not is_stored:
            return False
        disk = None if capture.seq.is_ahead else self.disk  # it is written once its conversation continues
        if disk is not None and capture.end not in self._lattice.get(capture.seq.seq_id, ()):
            disk.writer.stored(space, capture.key)
        if capture.end >= min(capture.seq.prefill_end, capture.seq.max_stored):
            points = capture.seq.prompt.snapshot_points  # a question after many tool calls resumes from an old point
            for cache in (self.tree, *(() if disk is None else (disk.writer,))):
                cache.thin(space, capture.key, keep_last=_STATES_OF_A_CONVERSATION, keep=points)
            for point in self._lattice.pop(capture.seq.seq_id, ()):
                for tree in self._trees:
                    tree.drop_state(space, capture.key[: point * WORD_BYTES])
        return True

    @property
    def _trees(self) -> list[MemoryAwarePrefixCache]:
        """The trees in memory and on disk."""
        return [self.tree] if self.disk is None else [self.tree, self.disk.tree]

    def follow(self, seq: Sequence, leader: Sequence) -> bool:
        """Return whether `seq` should wait for the prefill of `leader`, which then captures the common prefix.

        A model with recurrent state can only resume at a point that the leader has not passed yet. A model that
        resumes anywhere can also use tokens that the leader has passed, once they are captured.
        """
        has_scores = seq.is_scored or seq.prompt_logprobs is leader.prompt_logprobs  # soon, if they share them
        if seq.cache_salt != leader.cache_salt or seq.seq_id in self._unusable or not has_scores:
            return False
        mine, theirs = self._keys[seq.seq_id], self._keys[leader.seq_id]
        shared = min(common_tokens(mine, theirs), seq.prefill_end, leader.prefill_end, leader.max_stored)
        if shared < MIN_SHARED_TOKENS:
            return False
        if shared - self.tree.common_length(self._space(seq), mine) < MIN_SHARED_TOKENS:
            return False  # the cache holds it already, or almost
        if shared > leader.num_computed_tokens:
            self._points.setdefault(leader.seq_id, set()).add(shared)
            return True
        if self._resumes_anywhere:
            self._capture_soon.add(leader.seq_id)
            return True
        return False

    def awaits(self, seq: Sequence, capture: Capture) -> bool:
        """Return whether a capture of this step will hold more of the prompt than the cache does."""
        if seq.cache_salt != capture.seq.cache_salt or seq.seq_id in self._unusable or not seq.is_scored:
            return False
        mine = self._key(seq, seq.num_tokens)
        shared = common_tokens(mine, capture.key)
        if shared < capture.end and not self._resumes_anywhere:
            return False
        return shared - self.tree.common_length(self._space(seq), mine) >= MIN_SHARED_TOKENS

    def shrink_to(self, num_bytes: int) -> None:
        """Limit cached state to `num_bytes`, because rows need the rest."""
        with self._hold_fault():
            reserved = 0 if self.disk is None else self.disk.reader.reserved_bytes
            self.tree.set_limit(max(0, min(self._max_bytes, num_bytes) - reserved))

    def _space(self, seq: Sequence) -> Space:
        return (self.fingerprint, seq.cache_salt)

    def _key(self, seq: Sequence, end: int) -> bytes:
        prompt = self._keys[seq.seq_id]
        num_prompt = seq.num_prompt_tokens
        if end <= num_prompt:
            return prompt[: end * WORD_BYTES]
        return prompt + pack(seq.output_token_ids[: end - num_prompt])
