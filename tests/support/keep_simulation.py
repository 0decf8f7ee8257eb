"""The real prefix planner and trees on requests at given times: seconds of prefill, under any rule of what to keep.

Requests run one at a time: the clairvoyant rule must know the times of all requests, so that no rule may move them.
That leaves nothing for the scheduler to decide. Rows take memory of their own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from vllm_mlx.cache.index import WORD_BYTES, num_tokens, pack
from vllm_mlx.cache.node import Node, Piece, ResumeRule, Space
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.cache.victims import Worth
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.sequence import Sequence as Row
from vllm_mlx.core.step import Snapshot
from vllm_mlx.disk.writer import SETTLED_S, SPARING_S
from vllm_mlx.scheduler.prefix_planner import PrefixPlanner

from .device_model import Device, Shape
from .device_runner import State, footprint
from .keep_policies import Clairvoyant
from .recorded_sessions import DAY, Request

CHUNK = 2048
DISK_NODE = 4096  # most tokens of a node on disk
SHORT = 0.1  # share of memory that is free then
READ_BYTES_PER_S = 3e9
DAILY_BYTES = 50 * 10**9
NO_LIMIT = 1 << 60
SPACE: Space = ("simulated", "")
Rules = tuple[Worth, Worth]  # in memory and on disk


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """KV of some tokens of the path of the request `source`."""

    source: int
    start: int
    end: int
    window_start: int
    shape: Shape
    num_buffers: int = 1

    @property
    def nbytes(self) -> int:
        windowed = (self.end - self.window_start) * self.shape.num_windowed * self.shape.layer_token_bytes
        return (self.end - self.start) * self.shape.token_bytes + windowed

    def split(self, at: int) -> "tuple[Segment, Segment]":
        middle = self.start + at
        return (
            Segment(self.source, self.start, middle, min(self.window_start, middle), self.shape),
            Segment(self.source, middle, self.end, max(self.window_start, middle), self.shape),
        )


@dataclass(slots=True)
class Spent:
    """Seconds that prompts took."""

    computed_s: float = 0.0
    read_s: float = 0.0
    written_bytes: int = 0
    peak_bytes: int = 0  # most that the cache in memory held
    peak_disk_bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.computed_s + self.read_s


@cache
def prefill_s(device: Device, start: int, end: int) -> float:
    return sum(device.chunk_s(min(CHUNK, end - at), at) for at in range(start, end, CHUNK))


@cache
def s_per_token(device: Device) -> float:
    return (device.chunk_s(256) - device.chunk_s(64)) / 192


def rule_of(shape: Shape) -> ResumeRule:
    return ResumeRule(needs_state=shape.num_recurrent > 0, window=shape.window or None)


class Simulation:
    def __init__(
        self,
        device: Device,
        requests: Sequence[Request],
        *,
        memory_bytes: int = NO_LIMIT,
        disk_bytes: int = 0,
        daily_bytes: int = DAILY_BYTES,
        rules: Rules,
    ):
        self.spent = Spent()
        self._device = device
        self._requests = requests
        self._rules = rules
        self._limits = (memory_bytes, disk_bytes)
        self._daily_bytes = daily_bytes
        self._has_disk = disk_bytes > 0
        self._rule = rule_of(device.shape)
        self._memory, self._disk = (
            MemoryAwarePrefixCache(max_bytes=limit, worth=rule)
            for limit, rule in zip((memory_bytes, disk_bytes), rules, strict=True)
        )
        for tree, rule in zip((self._memory, self._disk), rules, strict=True):
            tree.add_model(SPACE[0], self._rule, s_per_token=s_per_token(device))
            if isinstance(rule, Clairvoyant):
                rule.bind(tree)
        self._memory.read_bytes_per_s = READ_BYTES_PER_S if disk_bytes else None
        self._planner = PrefixPlanner(
            self._memory, SPACE[0], self._rule, footprint(device.shape), max_bytes=memory_bytes, snapshot_every=0
        )
        self._unwritten: deque[tuple[float, bytes]] = deque()  # time of the last use, and key
        self._written_today, self._today = 0, 0

    def run(self) -> Spent:
        for number, request in enumerate(self._requests):
            self._write_due(request.at_s)
            for rule in self._rules:
                if isinstance(rule, Clairvoyant):
                    rule.begin(number)
            knows_all = isinstance(self._rules[0], Clairvoyant)
            for tree in (self._memory, self._disk) if knows_all else ():
                tree.set_limit(NO_LIMIT)
            self._serve(number, request)
            if self._has_disk and self._memory.used_bytes > (1 - SHORT) * self._limits[0]:
                self._write_due(request.at_s, is_filling=True)
            self._disk.set_limit(self._limits[1])
            if self._has_disk:
                self._forget_evicted()
            self._memory.set_limit(self._limits[0])
            self.spent.peak_bytes = max(self.spent.peak_bytes, self._memory.used_bytes)
            self.spent.peak_disk_bytes = max(self.spent.peak_disk_bytes, self._disk.used_bytes)
        return self.spent

    def _serve(self, number: int, request: Request) -> None:
        prompt = PromptInputs(token_ids=tuple(request.token_ids(0, request.num_prompt)), snapshot_points=request.points)
        row = Row(seq_id=number, prompt=prompt, sampling=TokenSampling(), max_tokens=1)
        planner, now = self._planner, request.at_s
        planner.open(row)
        if self._has_disk:
            self._read(number, pack(prompt.token_ids), now)
        planner.resume(row, now)
        planner.release_matches()
        while row.num_computed_tokens < row.prefill_end:
            start, end = row.num_computed_tokens, planner.next_point(row)
            self.spent.computed_s += prefill_s(self._device, start, end)
            row.num_computed_tokens = end
            self._capture(row, end, now)
        row.output_token_ids += request.token_ids(request.num_prompt, request.num_tokens)
        row.num_computed_tokens = row.num_tokens
        self._capture(row, row.num_tokens, now)
        planner.close(row)
        if self._has_disk:
            key = pack(row.key())
            self._unwritten = deque(path for path in self._unwritten if not key.startswith(path[1]))
            self._unwritten.append((now, key))

    def _capture(self, row: Row, end: int, now: float) -> None:
        capture = self._planner.plan_capture(row, end)
        if capture is None:
            return
        shape = self._device.shape
        window_start = max(capture.start, capture.end - shape.window) if shape.num_windowed else capture.start
        segment = Segment(capture.seq.seq_id, capture.start, capture.end, window_start, shape)
        rule = self._rules[0]
        if isinstance(rule, Clairvoyant) and self._rule == ResumeRule():
            for point in rule.forks(row.seq_id, capture.start, capture.end):
                before, segment = segment.split(point - segment.start)
                part = capture.key[: point * WORD_BYTES]
                self._memory.insert(
                    SPACE, part, start=before.start, segment=before, window_start=before.start, state=None, now=now
                )
            capture = replace(capture, start=segment.start)
            window_start = segment.start
        self._planner.insert(Snapshot(capture, segment, window_start, self._state()), now)

    def _state(self) -> State | None:
        size = self._device.shape.num_recurrent * self._device.shape.state_bytes
        return State(size) if size else None

    # The disk

    def _read(self, number: int, key: bytes, now: float) -> None:
        """Read what the disk has and memory lacks, if that takes less time than computing it."""
        held = self._memory.resume_length(SPACE, key)
        if self._disk.resume_length(SPACE, key) <= held:
            return
        found = self._disk.match(SPACE, key, now=now)
        pieces = [piece for piece in found.pieces if piece.start + piece.take > held]
        size = sum(_part(piece, held).nbytes for piece in pieces) + (found.state.nbytes if found.state else 0)
        read_s = size / READ_BYTES_PER_S
        if read_s < prefill_s(self._device, held, found.length) and self._memory.make_room(size):
            if self._memory.common_length(SPACE, key) < held:  # the room was made where the read begins
                self._disk.release(found)
                self._read(number, key, now)
                return
            self.spent.read_s += read_s
            for piece in pieces:
                part = _part(piece, held)
                is_last = part.end == found.length
                state = found.state if is_last else None
                self._memory.insert(
                    SPACE,
                    key[: part.end * WORD_BYTES],
                    start=part.start,
                    segment=part,
                    window_start=part.window_start,
                    state=state,
                    now=now,
                )
                self._memory.mark_copied(SPACE, key[: part.end * WORD_BYTES])
        self._disk.release(found)

    def _write_due(self, until_s: float, *, is_filling: bool = False) -> None:
        """Write the paths that are due at this time, as far as memory still has them, and all if it will soon evict."""
        while self._unwritten and (is_filling or self._unwritten[0][0] + self._settled_s <= until_s):
            used, key = self._unwritten.popleft()
            now = min(until_s, used + self._settled_s)
            if int(now // DAY) != self._today:
                self._today, self._written_today = int(now // DAY), 0
            self._disk.touch(SPACE, key, now=now)
            leaf, common = self._memory.store.nearest(SPACE, key)
            if leaf is not None and common:
                path = leaf.at(common).path()
                for node in path:
                    self._write(node, key, now)
                kept = [node.end for node in path if node.state is not None]
                self._disk.thin(SPACE, key[: common * WORD_BYTES], keep_last=1, keep=kept)

    @property
    def _settled_s(self) -> float:
        """Since its last use, before a path is due."""
        return SPARING_S if 2 * self._written_today > self._daily_bytes else SETTLED_S

    def _forget_evicted(self) -> None:
        """Take the mark from nodes that the disk has no more."""
        for leaf in [leaf for paths in self._memory.store.spaces.values() for leaf in paths.leaves]:
            assert leaf.key is not None
            stored = self._disk.common_length(SPACE, leaf.key)
            for node in leaf.path():
                node.is_copied &= node.end <= stored

    def _write(self, node: Node, key: bytes, now: float) -> None:
        """Write what the disk lacks of a node, in pieces."""
        end = min(node.end, num_tokens(key))
        lacks_state = (
            node.state is not None
            and self._disk.resume_length(SPACE, key[: end * WORD_BYTES] + bytes(WORD_BYTES)) < end
        )
        stored = self._disk.common_length(SPACE, key[: end * WORD_BYTES])
        if stored < node.start or (stored >= end and not lacks_state):
            return
        assert isinstance(node.segment, Segment)
        source, shape = node.segment.source, self._device.shape
        start = min(stored, end)
        while start < end or lacks_state:
            stop = min(end, start + DISK_NODE)
            is_last = stop == end
            segment = Segment(source, start, stop, min(stop, max(start, node.window_start)), shape)
            state = node.state if is_last and node.end == end else None
            size = segment.nbytes + (state.nbytes if state is not None else 0)
            if self._written_today + size > self._daily_bytes:
                return
            part = key[: stop * WORD_BYTES]
            if not self._disk.insert(
                SPACE, part, start=start, segment=segment, window_start=segment.window_start, state=state, now=now
            ):
                return
            self._written_today += size
            self.spent.written_bytes += size
            start, lacks_state = stop, lacks_state and not is_last
        if node.end == end:
            node.is_copied = True


def _part(piece: Piece, held: int) -> Segment:
    """The tokens of a piece that are used and lie behind the first `held`."""
    segment = piece.segment
    assert isinstance(segment, Segment)
    start, end = max(piece.start, held), piece.start + piece.take
    window_start = min(end, max(start, segment.window_start))
    return Segment(segment.source, start, end, window_start, segment.shape)
