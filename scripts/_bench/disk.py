"""Workload set `disk`: the cost of a restart that finds its prompt on disk, and of writing beside running rows.

Everything runs in this process. A restart is a new engine on the folder of the last one. On Linux the page cache is
dropped before each read from disk; macOS has no call for it, so that both reads come from memory there.

Only the first tokens of the prompt are computed: their KV stands for that of the others, which has the same size.
"""

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from scripts.served import BenchmarkError
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_driver import Driver
from vllm_mlx.cache.index import WORD_BYTES
from vllm_mlx.cache.node import Node
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.disk.files import PIECE_BYTES
from vllm_mlx.disk.place import RECORDS
from vllm_mlx.engine.lane import Source
from vllm_mlx.engine.loading import load_engines, open_disk
from vllm_mlx.runner.checkpoint import find_checkpoint

from .checkpoint import speak_in_words
from .figures import OURS, Figure, Played, at_most, read_off

_COMPUTED = 1024
NUM_TOKENS = 30 * _COMPUTED + 1
BARE_READ, ALONE = "bare read", "no writer"
FROM_MEMORY, BEYOND = "first token, from memory", "from disk, beyond memory"
_MOST = 1.5  # bare reads, beyond what the same takes from memory
_SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 8},
    "qwen3_5": {"num_hidden_layers": 8, "full_attention_interval": 2},
    "gpt_oss": {},
}
_SETTINGS: dict[str, Any] = {
    "max_model_len": 40_000,
    "memory_budget_bytes": 6 << 30,
    "cache_disk_bytes": 40 << 30,
    "cache_disk_daily_bytes": 1 << 42,
}
_STOP_S = 60.0  # the longest wait for what is not written yet, at a stop
_QUIET_S = 20.0  # the longest wait for a record that is being written
_STEPS, _PREFILL = 100, 256  # of a decode that is timed, and tokens of a prefill


def write_wide(folder: Path, architecture: str) -> Path:
    """Write a checkpoint with tens of kilobytes of KV a token, as real models have, and few weights."""
    write_checkpoint(folder, architecture, **_SHAPE, **_LAYERS[architecture])
    speak_in_words(folder)
    return folder


def ids(num_tokens: int, first: int = 0) -> list[int]:
    return [7 + (5 * place * place + 3 * place + place // 977 + first) % 900 for place in range(num_tokens)]


def packed(token_ids: list[int]) -> bytes:
    return b"".join(token_id.to_bytes(WORD_BYTES, "big") for token_id in token_ids)


def repeat(tree: MemoryAwarePrefixCache, leaf: Node, words: bytes, start: int) -> None:
    """Store the leaf's path again and again for the words from `start` on, as far as it fits below the last one."""
    path = [node for node in leaf.path() if node.end <= (leaf.end // 256) * 256]
    length = path[-1].end
    while start + length < len(words) // WORD_BYTES:
        for node in path:
            is_stored = tree.insert(
                leaf.space,
                words[: (start + node.end) * WORD_BYTES],
                start=start + node.start,
                segment=node.segment,
                window_start=start + node.window_start,
                state=node.state,
                now=time.monotonic(),
            )
            if not is_stored:
                raise BenchmarkError("The prefix cache has no room for the prompt.")
        start += length


def longest(tree: MemoryAwarePrefixCache) -> Node:
    return max((node for node in tree.store.nodes() if node.key is not None), key=lambda node: node.end)


def dropped(folder: Path) -> Iterator[int]:
    """Yield the records as open files, no byte of which is in the page cache."""
    for path in sorted(folder.rglob("*.kv")):
        file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        yield file
        os.close(file)


def loaded(model: Path, folder: Path) -> Driver:
    """Return an engine that keeps its cache in the folder."""
    settings = {**_SETTINGS, "cache_dir": str(folder)}
    config = EngineConfig(model=str(model), **settings)
    driver = Driver(model, **settings)
    source = Source(name=config.model, config=config, checkpoint=find_checkpoint(str(model)))
    driver.engine = load_engines([source], open_disk(config))
    return driver


@contextlib.contextmanager
def started(model: Path, folder: Path) -> Iterator[Driver]:
    """Run the engine of one server, from its start to its clean stop."""
    driver = loaded(model, folder)
    yield driver
    end_s, disk = time.monotonic() + _STOP_S, driver.engine.disk
    driver.engine.close(lambda: end_s - time.monotonic())
    if disk is not None:
        disk.store.folder.close()  # so that the next engine may own it


def first_token(driver: Driver, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and the number of cached tokens.

    All freed buffers are given back before: a request just after the start finds no memory that is used already.
    """
    news = threading.Event()
    assert driver.engine.disk is not None, "it was attached"
    driver.engine.disk.wake_with(news.set)
    mx.clear_cache()
    begun_s = time.perf_counter()
    seq_id = driver.add(prompt, max_tokens=1)
    while driver.replies[seq_id].finish_reason is None:
        if not driver.engine.is_busy:
            news.wait()
        news.clear()
        driver.engine.wake()
        driver.step()
    return 1000 * (time.perf_counter() - begun_s), driver.seqs[seq_id].num_cached_tokens


@dataclass(slots=True)
class Restarts(Played):
    """`play` starts another engine and asks twice for one token."""

    model: Path
    folder: Path

    def fill(self) -> None:
        prompt = ids(NUM_TOKENS)
        with started(self.model, self.folder) as driver:
            first_token(driver, prompt[:_COMPUTED])
            tree = driver.engine.cache_tree
            assert tree is not None
            leaf = longest(tree)
            repeat(tree, leaf, packed(prompt), (leaf.end // 256) * 256)
            first_token(driver, prompt)

    def play(self) -> float:
        """Return milliseconds to the first token from disk."""
        with started(self.model, self.folder) as driver:
            for _ in dropped(self.folder):
                pass
            disk_ms, num_cached = first_token(driver, ids(NUM_TOKENS))
            memory_ms, num_in_memory = first_token(driver, ids(NUM_TOKENS))
            disk = driver.engine.report().disk
        if num_cached != num_in_memory or disk is None or disk.hits != 1:
            raise BenchmarkError(f"{num_cached} tokens came from disk, {num_in_memory} from memory.")
        self.values = {FROM_MEMORY: memory_ms, BEYOND: disk_ms - memory_ms, BARE_READ: self._bare_ms(disk.bytes_read)}
        self.values["read"] = disk.bytes_read / 1e6
        return disk_ms

    def _bare_ms(self, num_bytes: int) -> float:
        """Read as many bytes of the same files into new memory, which holds them all."""
        elapsed_s, done = 0.0, 0
        with mmap.mmap(-1, num_bytes) as memory, memoryview(memory) as buffer:
            for file in dropped(self.folder):
                begun_s, offset = time.perf_counter(), 0
                while done < num_bytes and (count := os.preadv(file, [buffer[done : done + PIECE_BYTES]], offset)):
                    offset += count
                    done += count
                elapsed_s += time.perf_counter() - begun_s
        return 1000 * elapsed_s

    def figures(self) -> list[Figure]:
        loads, beyond = {OURS: self}, {OURS: self.read(BEYOND), BARE_READ: self.read(BARE_READ)}
        return [
            Figure("first token, from disk", "ms", {OURS: self.play}),
            read_off(FROM_MEMORY, "ms", loads),
            Figure(BEYOND, "ms", beyond, (at_most(_MOST, BARE_READ),)),
            read_off("read", "MB", loads),
        ]


class Beside:
    """Rows of one engine, beside a writer that writes and beside one that waits."""

    def __init__(self, model: Path, folder: Path):
        self._driver = loaded(model, folder)
        self._engine = self._driver.engine
        self._first = 0
        self._driver.generate([ids(_COMPUTED)], max_tokens=1)
        tree, disk = self._engine.cache_tree, self._engine.disk
        assert tree is not None and disk is not None
        self._tree, self._leaf, self._disk = tree, longest(tree), disk
        self._records = folder / RECORDS

    def decode_ms(self, *, is_writing: bool) -> float:
        """Return the time of a step of one row."""
        row = self._driver.add(ids(32, self._next()), max_tokens=10_000)
        while self._driver.seqs[row].num_output_tokens < 3:
            self._driver.step()
        elapsed_ms = self._timed(is_writing, self._steps)
        self._engine.abort([row])
        self._driver.run()
        return elapsed_ms / _STEPS

    def _steps(self) -> None:
        for _ in range(_STEPS):
            self._driver.step()

    def prefill_ms(self, *, is_writing: bool) -> float:
        prompt = ids(_PREFILL, self._next())
        return self._timed(is_writing, lambda: self._driver.generate([prompt], max_tokens=1))

    def _timed(self, is_writing: bool, work: Callable[[], object]) -> float:
        self._forget_all()
        if is_writing:
            words = packed([1000 + self._next(), *ids(20_000)])
            repeat(self._tree, self._leaf, words, 0)
            self._disk.writer.stored(self._leaf.space, words)
            self._disk.tick(is_idle=False, is_last=True)  # it is due at once
            while not any(self._records.glob("*.kv")):
                time.sleep(0.001)
        begun_s = time.perf_counter()
        work()
        elapsed_ms = 1000 * (time.perf_counter() - begun_s)
        if is_writing and not self._disk.report().num_waiting_bytes:
            raise BenchmarkError("The writer had ended before the rows had.")
        self._forget_all()
        return elapsed_ms

    def _forget_all(self) -> None:
        """End all writing, and keep only the path that stands for others in memory."""
        self._disk.clear()
        self._disk.write_all(lambda: _QUIET_S)
        for node in [node for node in self._tree.store.nodes() if node.key is not None and node is not self._leaf]:
            if node.key is not None:
                self._tree.drop(node.space, node.key)

    def _next(self) -> int:
        self._first += 1
        return self._first

    def close(self) -> None:
        self._engine.close(lambda: 0.0)

    def figures(self) -> list[Figure]:
        found = []
        for name, measure, bound in (("decode step", self.decode_ms, 1 / 0.97), ("prefill", self.prefill_ms, 1.03)):
            measures = {
                OURS: lambda measure=measure: measure(is_writing=True),
                ALONE: lambda measure=measure: measure(is_writing=False),
            }
            found.append(Figure(f"{name} beside the writer", "ms", measures, (at_most(bound, ALONE),)))
        return found


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """Yield the figures of this set."""
    with tempfile.TemporaryDirectory(prefix="vllm-mlx-disk-") as root:
        restarts = Restarts(model, Path(root) / "restarts")
        restarts.fill()
        beside = Beside(model, Path(root) / "beside")
        try:
            yield [*restarts.figures(), *beside.figures()]
        finally:
            beside.close()
