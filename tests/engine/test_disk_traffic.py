"""What the disk tier reads and copies, counted: what a resume point needs, and nothing on the engine thread."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from vllm_mlx.disk import arrays, reader
from vllm_mlx.disk.arrays import SLAB_TOKENS

from .test_disk_any_load import NUM_TOKENS, started
from .test_disk_faults import full

PROMPT = [7 + (5 * place * place + 3 * place) % 180 for place in range(800)]
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, fp32


def recorded(called: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    def record(*args: Any) -> Any:
        result = called(*args)
        note(result)
        return result

    return record


@pytest.mark.parametrize(
    ("num_shared", "chunk"), [(300, 1 << 30), (len(PROMPT) - 1, 100_000), pytest.param(512, 1, marks=pytest.mark.full)]
)
def test_bytes_that_are_read_are_the_needed_ones_to_a_slab(
    num_shared: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks they are divided into."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", chunk)
    with started(checkpoint("llama"), tmp_path) as server:
        server.generate(tuple(PROMPT))
    num_bytes: list[int] = []
    with started(checkpoint("llama"), tmp_path) as server:
        monkeypatch.setattr(os, "preadv", recorded(os.preadv, num_bytes.append))
        prompt = (*PROMPT[:num_shared], 3, 5, 9)
        assert server.generate(prompt) == [plain_loop(checkpoint("llama"), prompt, NUM_TOKENS)[0]]
        report = server.disk.report()
    num_slabs = -(-num_shared // SLAB_TOKENS)
    assert report.tokens_read == num_shared
    assert report.bytes_read == sum(num_bytes)
    assert num_shared * TOKEN_BYTES <= sum(num_bytes) <= num_slabs * SLAB_TOKENS * TOKEN_BYTES


def test_a_path_is_due_until_it_is_written_or_the_disk_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks more often while one is due, and a model that leaves waits for it."""
    with started(checkpoint("llama"), tmp_path) as server:
        assert not server.disk.is_due_soon and server.disk.is_written
        server.generate(tuple(PROMPT))
        assert server.disk.is_due_soon and not server.disk.is_written
        server.disk.write_all(lambda: 60)
        assert not server.disk.is_due_soon and server.disk.is_written
        server.generate(tuple(PROMPT[1:]))
        with monkeypatch.context() as patching:
            patching.setattr(os, "write", full(os.write))
            server.disk.write_all(lambda: 60)
            assert not server.disk.is_due_soon and server.disk.is_written
        assert server.disk.report().off_reason is None


def test_what_is_written_is_copied_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    note = recorded(arrays.copied, lambda _: threads.add(threading.current_thread().name))
    monkeypatch.setattr(arrays, "copied", note)
    with started(checkpoint("qwen3_5"), tmp_path) as server:
        server.generate(tuple(PROMPT))
    assert threads and threading.current_thread().name not in threads


class SlowClock:
    """Each look at it takes an hour, so that any read was slow."""

    now_s = 0.0
    time = staticmethod(time.time)

    @classmethod
    def monotonic(cls) -> float:
        cls.now_s += 3600.0
        return cls.now_s


def test_a_disk_that_was_slow_is_not_read_for_a_while_and_then_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")
    prompts = [(number, *PROMPT[:300]) for number in range(1, 8)]
    with started(path, tmp_path) as server:
        for prompt in prompts:
            server.generate(prompt)
    monkeypatch.setattr(reader, "time", SlowClock)
    monkeypatch.setattr(reader, "_LARGE_BYTES", 1)
    with started(path, tmp_path) as server:
        counts = []
        for prompt in prompts:
            assert server.generate(prompt) == [plain_loop(path, prompt, 6)[0]]
            report = server.disk.report()
            counts.append((report.hits, report.reads_not_made))
    assert counts == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (4, 3)]
