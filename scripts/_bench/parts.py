"""Workload set `parts`: attention of a resumed row over its prefix in parts, beside attention over one copy of it.

One layer, in this process. The prefix lies in the blocks of a prefix cache, and what the row adds in a buffer of its
own. Times are of this device; bytes and kernels are computed for a layer of an 8B model, and hold for Metal too.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import mlx.core as mx

from vllm_mlx.cache.snapshot import BLOCK_TOKENS

from .client import BenchmarkError
from .figures import OURS, Aim, Figure

ONE_SOFTMAX, MERGED, JOINED = "parts, one softmax", "parts, merged", "joined each time"
LENGTHS = {1: (1_000, 4_000, 16_000, 60_000), 256: (1_000, 4_000)}  # by queries: a CPU takes long for chunks
QUERIES = {1: "decode step", 256: "chunk of 256"}
KERNEL_S = 3e-6  # a kernel's submission on Metal, beside other work
BYTES_PER_S = 400e9  # of an M-series Max
OWN = 256  # tokens of the row's own buffer
_REPEATS = {1: 5, 256: 1}
_TOLERANCE = 1e-3
KV = tuple[mx.array, mx.array]  # (1, heads, tokens, width)
Attend = Callable[[mx.array, list[KV]], mx.array]


@dataclass(frozen=True, slots=True)
class Layer:
    num_heads: int
    num_kv_heads: int
    width: int
    value_bytes: int

    def kv(self, num_tokens: int) -> KV:
        shape = (1, self.num_kv_heads, num_tokens, self.width)
        return mx.random.normal(shape), mx.random.normal(shape)

    def kv_bytes(self, num_tokens: int) -> int:
        return 2 * self.num_kv_heads * num_tokens * self.width * self.value_bytes


MEASURED = Layer(num_heads=8, num_kv_heads=2, width=64, value_bytes=4)
COUNTED = Layer(num_heads=32, num_kv_heads=8, width=128, value_bytes=2)  # a layer of Qwen3-8B


def one_copy(queries: mx.array, parts: list[KV]) -> mx.array:
    [(keys, values)] = parts
    mask = "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def joined(queries: mx.array, parts: list[KV]) -> mx.array:
    return one_copy(queries, [_copy(parts)])


def one_softmax(queries: mx.array, parts: list[KV]) -> mx.array:
    """Scores of each part, one softmax over all of them, a product of each part."""
    num_heads = queries.shape[1]
    grouped, scores = _scores(queries, parts)
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    outputs, start = [], 0
    for _, values in parts:
        end = start + values.shape[2]
        outputs.append(weights[..., start:end] @ values)
        start = end
    return _ungrouped(sum(outputs[1:], outputs[0]), grouped, num_heads)


def merged(queries: mx.array, parts: list[KV]) -> mx.array:
    """A softmax of each part, weighted by the part's share of the sum of all exponentials."""
    num_heads = queries.shape[1]
    grouped, scores = _scores(queries, parts)
    sums = mx.concatenate([mx.logsumexp(one, axis=-1, keepdims=True) for one in scores], axis=-1)
    shares = mx.softmax(sums, axis=-1, precise=True)
    outputs = [
        mx.softmax(one, axis=-1, precise=True) @ values * shares[..., number : number + 1]
        for number, (one, (_, values)) in enumerate(zip(scores, parts, strict=True))
    ]
    return _ungrouped(sum(outputs[1:], outputs[0]), grouped, num_heads)


def _scores(queries: mx.array, parts: list[KV]) -> tuple[mx.array, list[mx.array]]:
    """Queries of the heads that share keys, one below the other, and their scores. The last part holds the newest."""
    _, num_heads, num_queries, width = queries.shape
    num_kv_heads = parts[0][0].shape[1]
    grouped = (queries * width**-0.5).reshape(1, num_kv_heads, -1, width)
    scores = [grouped @ keys.swapaxes(-1, -2) for keys, _ in parts]
    if num_queries > 1:
        position, slots = mx.arange(num_queries)[:, None], mx.arange(scores[-1].shape[-1])[None]
        visible = slots <= position + (scores[-1].shape[-1] - num_queries)
        tiled = mx.tile(visible, (num_heads // num_kv_heads, 1))
        scores[-1] = mx.where(tiled, scores[-1], -float("inf"))
    return grouped, scores


def _ungrouped(output: mx.array, grouped: mx.array, num_heads: int) -> mx.array:
    return output.reshape(1, num_heads, -1, grouped.shape[-1])


@dataclass(frozen=True, slots=True)
class Case:
    """One prefix, in blocks or as one part, and what the row has added to it."""

    length: int
    num_queries: int
    in_blocks: bool

    @property
    def prefix(self) -> int:
        return self.length - OWN

    @property
    def num_parts(self) -> int:
        return 1 + (-(-self.prefix // BLOCK_TOKENS) if self.in_blocks else 1)

    @property
    def name(self) -> str:
        return f"{QUERIES[self.num_queries]}, {self.length:,} in {self.num_parts} parts"

    def parts(self) -> list[KV]:
        step = BLOCK_TOKENS if self.in_blocks else self.prefix
        sizes = [min(step, self.prefix - start) for start in range(0, self.prefix, step)]
        return [MEASURED.kv(size) for size in (*sizes, OWN)]


CASES = [
    Case(length, num_queries, in_blocks)
    for num_queries in QUERIES
    for length in LENGTHS[num_queries]
    for in_blocks in ((False,) if length - OWN <= BLOCK_TOKENS else (False, True))
]


class CaseLoad:
    """The buffers of one case, made when they are first used."""

    def __init__(self, case: Case):
        self._case = case

    def figures(self) -> Iterator[Figure]:
        case = self._case
        ways: dict[str, Attend] = {OURS: one_copy, ONE_SOFTMAX: one_softmax, MERGED: merged, JOINED: joined}
        aims = tuple(Aim(bound=1.0, at_least=False, against=name) for name in ways if name != OURS)
        yield _figure(case.name, "ms", {name: partial(self._ms, way) for name, way in ways.items()}, aims)
        yield _figure(f"kernels, {case.name}", "", _constants(kernels(case)), aims)
        yield _figure(f"bytes, {case.name}", "MB", _constants(traffic_mb(case)), aims)
        if case.num_queries == 1:
            yield _figure(f"paid here, {case.name}", "steps", {OURS: self._steps})
            yield _figure(f"paid on Metal, {case.name}", "steps", {OURS: partial(paid_after, case)})

    def _ms(self, attend: Attend) -> float:
        """The median of some calls, in milliseconds."""
        given = [_copy(self._parts)] if attend is one_copy else self._parts
        mx.eval(given)
        return _median_ms(lambda: attend(self._queries, given), _REPEATS[self._case.num_queries])

    def _steps(self) -> float:
        """Decode steps after which the copy of the prefix has cost less than attention over parts."""
        own = MEASURED.kv(OWN)  # one array alone would not be copied
        copy_ms = _median_ms(lambda: _copy([*self._parts[:-1], own]), 3)
        saved_ms = min(self._ms(one_softmax), self._ms(merged)) - self._ms(one_copy)
        return copy_ms / saved_ms if saved_ms > 0 else float("inf")

    @cached_property
    def _queries(self) -> mx.array:
        return mx.random.normal((1, MEASURED.num_heads, self._case.num_queries, MEASURED.width))

    @cached_property
    def _parts(self) -> list[KV]:
        parts = self._case.parts()
        expected = joined(self._queries, parts)
        for way in (one_softmax, merged):
            if not mx.allclose(way(self._queries, parts), expected, atol=_TOLERANCE).item():
                raise BenchmarkError("Attention over parts differs from attention over one copy.")
        return parts


def _copy(parts: list[KV]) -> KV:
    keys, values = (mx.concatenate([part[side] for part in parts], axis=2) for side in (0, 1))
    return keys, values


def _figure(name: str, unit: str, measures: dict[str, Callable[[], float]], aims: tuple[Aim, ...] = ()) -> Figure:
    return Figure(name=name, unit=unit, measures=measures, aims=aims)


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    clock = time.perf_counter if mx.metal.is_available() else time.process_time  # all threads of this process
    taken = []
    for _ in range(repeats):
        start = clock()
        mx.eval(work())
        taken.append(1000 * (clock() - start))
    return median(taken)


def kernels(case: Case) -> dict[str, float]:
    """Kernels of one layer, on a device that fuses attention. A decode step over a long cache is two passes there.

    A part costs a product for its scores, one copy of them or a softmax and a sum of exponentials, a product with its
    values, perhaps a product with its share, and an addition. Two buffers are joined by one copy for each part.
    """
    fused = 2 if case.num_queries == 1 and case.length > BLOCK_TOKENS else 1
    masked = 0 if case.num_queries == 1 else 4
    num = case.num_parts
    return {
        OURS: fused,
        ONE_SOFTMAX: 1 + 3 * num + 1 + (num - 1) + masked,
        MERGED: 1 + 5 * num + num + 1 + (num - 1) + masked,
        JOINED: 2 * num + fused,
    }


def traffic_mb(case: Case) -> dict[str, float]:
    """Megabytes of a layer that are read or written: KV and, unless attention is fused, scores of two bytes."""
    kv = COUNTED.kv_bytes(case.length)
    scores = COUNTED.num_heads * case.num_queries * case.length * COUNTED.value_bytes
    passes = {OURS: 0, ONE_SOFTMAX: 6, MERGED: 5, JOINED: 0}
    return {name: (kv * (3 if name == JOINED else 1) + count * scores) / 1e6 for name, count in passes.items()}


def paid_after(case: Case) -> float:
    """Decode steps after which the copy of the prefix has cost less than attention over parts, on Metal, computed."""
    counts, traffic = kernels(case), traffic_mb(case)
    seconds = {name: counts[name] * KERNEL_S + traffic[name] * 1e6 / BYTES_PER_S for name in counts}
    copy_s = 2 * (case.num_parts - 1) * KERNEL_S + 2 * COUNTED.kv_bytes(case.prefix) / BYTES_PER_S
    return copy_s / (min(seconds[ONE_SOFTMAX], seconds[MERGED]) - seconds[OURS])


def _constants(values: dict[str, float]) -> dict[str, Callable[[], float]]:
    return {name: partial(float, value) for name, value in values.items()}


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """The figures of this set. They use no checkpoint."""
    mx.random.seed(0)
    yield [figure for case in CASES for figure in CaseLoad(case).figures()]
