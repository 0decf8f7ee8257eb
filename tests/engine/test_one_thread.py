"""Which thread runs what: model work on the engine's own, aborts there too and between two steps."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.rows import row
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine

from .test_client import collect, request, until_idle, until_running

MODEL_WORK = ("/vllm_mlx/runner/", "/vllm_mlx/scheduler/", "/vllm_mlx/cache/tree.py", "/vllm_mlx/cache/snapshot.py")
SHARED = "/scheduler/residence.py"  # the event loop notes there when a model was used, and reads where its weights are
Calls = list[tuple[str, str, list[str]]]  # file and name of a function, thread, functions that called it


@contextmanager
def calls_of_new_threads() -> Iterator[Calls]:
    calls: Calls = []

    def observe(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and ("/vllm_mlx/" in code.co_filename):
            name = f"{code.co_filename}::{code.co_qualname}"
            stack = names(frame.f_back) if name.endswith("engine.py::LLMEngine.abort") else []
            calls.append((name, threading.current_thread().name, stack))

    threading.setprofile(observe)
    try:
        yield calls
    finally:
        threading.setprofile(None)


def names(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def traced(work: Callable[[EngineClient], Any], path: Path) -> Calls:
    """The calls in all threads that begin with the engine, the event loop's among them, once it is loaded."""
    with calls_of_new_threads() as calls:
        engine = start_engine(EngineConfig(model=str(path), memory_budget_bytes=2 << 30, max_model_len=60_000))
        calls.clear()
        loop = threading.Thread(target=lambda: asyncio.run(work(engine)), name="event loop")
        loop.start()
        loop.join(120)
    return calls


@row("S4-31")
def test_one_thread_runs_all_model_work(checkpoint: Callable[..., Path]) -> None:
    async def work(engine: EngineClient) -> None:
        await asyncio.gather(*(collect(engine, request(prompt=f"number {number}")) for number in range(3)))
        await engine.status()
        await engine.shutdown(0)

    calls = traced(work, checkpoint("qwen3"))
    at_work = {thread for name, thread, _ in calls if any(part in name for part in MODEL_WORK) and SHARED not in name}
    assert len(at_work) == 1 and "event loop" not in at_work
    assert any(thread == "event loop" for _, thread, _ in calls), "the loop was watched as well"


@row("S4-13")
def test_an_abort_waits_for_the_engine_thread_to_be_between_two_steps(checkpoint: Callable[..., Path]) -> None:
    async def work(engine: EngineClient) -> None:
        for _ in range(5):
            task = asyncio.create_task(collect(engine, request(max_tokens=50_000)))
            await until_running(engine)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until_idle(engine)
        await engine.shutdown(0)

    aborts = [(thread, stack) for name, thread, stack in traced(work, checkpoint("qwen3")) if stack]
    assert len(aborts) == 5
    assert all(thread != "event loop" and "step" not in stack for thread, stack in aborts)
