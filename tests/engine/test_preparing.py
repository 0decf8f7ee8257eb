"""Preparing a request has one deadline, can be seen and cancelled, and ends when nobody waits for it."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import Cancelled, TimeLimit
from vllm_mlx.core.messages import Message, TextPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.engine.preparing import LONG_CHARS, is_long
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.util.tasks import Deadline

LIMIT_S = 0.2
CHAT = Request(
    request_id="r", messages=(Message("user", (TextPart("Hello"),)),), tools=(ToolSpec("look", "", {"type": "object"}),)
)


@contextmanager
def started(path: Path, **limits: float) -> Iterator[EngineClient]:
    engine = start_engine(EngineConfig(model=str(path), memory_budget_bytes=1 << 30, **limits))
    yield engine
    asyncio.run(engine.shutdown(0))


@pytest.fixture(scope="module")
def engine(checkpoint) -> Iterator[EngineClient]:
    with started(checkpoint("qwen3")) as engine:
        yield engine


@pytest.fixture
def planning(checkpoint) -> Iterator[EngineClient]:
    """An engine whose model resumes at planned points alone, so that a prompt is rendered more often."""
    with started(checkpoint("qwen3_5")) as engine:
        yield engine


@pytest.fixture
def hurried(checkpoint) -> Iterator[EngineClient]:
    with started(checkpoint("qwen3"), max_prepare_s=LIMIT_S) as engine:
        yield engine


@pytest.fixture
def blocked(monkeypatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events: rendering has begun; it may end."""
    begun, may_end = threading.Event(), threading.Event()
    render = Tokenizer.apply_chat_template

    def waiting(*args, **kwargs):
        begun.set()
        assert may_end.wait(30)
        return render(*args, **kwargs)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", waiting)
    yield begun, may_end
    may_end.set()


def test_the_deadline_is_looked_at_in_every_stage(planning):
    """One that passes at the first look, at the second, and so on, until the request is done before."""
    for num_looks in itertools.count():
        time = itertools.count()
        deadline = Deadline(num_looks, "too slow", clock=lambda time=time: next(time))
        try:
            planning.processor.prepare(CHAT, deadline=deadline)
        except TimeLimit:
            continue
        break
    assert num_looks >= 10


def test_a_request_that_is_given_up_is_not_prepared_to_its_end(engine):
    deadline = Deadline(60, "too slow")
    deadline.cancel()
    with pytest.raises(Cancelled):
        engine.processor.prepare(CHAT, deadline=deadline)


def test_a_preparation_that_takes_too_long_is_refused_while_its_thread_still_works(hurried, blocked):
    async def main() -> None:
        with pytest.raises(TimeLimit, match="--max-prepare-s"):
            await hurried.submit(CHAT)
        assert not blocked[1].is_set() and not hurried.preparations.replies

    asyncio.run(main())


def test_a_request_that_is_prepared_is_listed_as_queued_and_can_be_cancelled(engine, blocked):
    async def main() -> None:
        submitted = asyncio.create_task(engine.submit(CHAT))
        await asyncio.to_thread(blocked[0].wait, 30)
        [listed] = (await engine.status())["requests"]
        assert (listed["request_id"], listed["phase"], listed["status"]) == ("r", "queued", "waiting")
        assert not engine.cancel("r", salts="another's/")
        assert engine.cancel("r")
        with pytest.raises(Cancelled):
            await submitted
        assert (await engine.status())["requests"] == []

    asyncio.run(main())


def test_a_caller_that_leaves_ends_the_preparation(engine, blocked, monkeypatch):
    ended = threading.Event()
    cancel = Deadline.cancel

    def noting(self: Deadline) -> None:
        cancel(self)
        ended.set()

    monkeypatch.setattr(Deadline, "cancel", noting)

    async def main() -> None:
        counted = asyncio.create_task(engine.count_tokens(CHAT))
        await asyncio.to_thread(blocked[0].wait, 30)
        counted.cancel()
        await asyncio.gather(counted, return_exceptions=True)
        assert counted.cancelled() and ended.is_set() and not engine.queue.num_preparing

    asyncio.run(main())


def test_long_is_what_takes_long_to_tokenise():
    half = "x" * (LONG_CHARS // 2)
    messages = (Message("user", (TextPart(half),)), Message("user", (TextPart(half),)))
    assert is_long(Request(request_id="r", messages=messages))
    assert not is_long(Request(request_id="r", messages=messages[:1]))
    assert is_long(Request(request_id="r", prompt=half * 2))
    assert is_long(Request(request_id="r", prompt=half, suffix=half))
    assert not is_long(Request(request_id="r", prompt=(5,) * LONG_CHARS))
