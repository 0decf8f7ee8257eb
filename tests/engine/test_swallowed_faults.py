"""No fault of the device is lost in work that is not the rows' own: in a question, a load, or a model that leaves."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, Reply, plain_loop
from tests.support.failing_device import INTERACTIVITY, NO_BUFFER, OUT_OF_MEMORY, failing_device
from tests.support.unloading import FIRST, Serving, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.lane import Source
from vllm_mlx.engine.loading import load_engines
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import begin_loading
from vllm_mlx.util.faults import MAX_FAULTS

LENGTH = 24
PROMPT = FIRST[:60]


def fail(engine: LLMEngine) -> None:
    raise RuntimeError(INTERACTIVITY)


@pytest.mark.parametrize("num_steps", [1, 5], ids=["prefilled", "decoding"])
def test_the_end_of_the_engine_in_a_question_ends_its_next_step(num_steps: int) -> None:
    driver = Driver(checkpoint("qwen3"))
    seq_id = driver.add(PROMPT, LENGTH)
    for _ in range(num_steps):
        driver.step()
    for _ in range(MAX_FAULTS - 1):
        with pytest.raises(RuntimeError, match="Interactivity"):
            driver.engine.ask(fail)
    with pytest.raises(EngineDead, match="in a row"):
        driver.engine.ask(fail)
    for work in (driver.step, lambda: driver.engine.move()):
        with pytest.raises(EngineDead, match="in a row"):
            work()
    with pytest.raises(EngineDead, match="in a row"):
        driver.engine.ask(LLMEngine.report)
    told = driver.replies[seq_id].token_ids
    assert told == plain_loop(checkpoint("qwen3"), PROMPT, LENGTH)[0][: len(told)]
    assert driver.replies[seq_id].finish_reason is None


def test_a_reply_ends_with_the_engine_that_a_question_has_ended() -> None:
    """All questions come between the same two steps, so that no token proves the device good in between."""

    async def asked(served: Serving) -> list[object]:
        running = asyncio.create_task(served.reply(FIRST, SamplingParams(max_tokens=1000, ignore_eos=True)))
        while not await served.client.ask(lambda engine: engine.num_rows):
            await asyncio.sleep(0)
        held = threading.Event()
        questions = [lambda engine: held.wait(120), *[fail] * MAX_FAULTS, LLMEngine.report]
        answers = [asyncio.create_task(served.client.ask(question)) for question in questions]
        await asyncio.sleep(0)
        held.set()
        return await asyncio.gather(*answers, running, return_exceptions=True)

    with serving(checkpoint("qwen3")) as served:
        _, first, second, third, last, reply = served.loop.run_until_complete(asyncio.wait_for(asked(served), 120))
        assert type(first) is type(second) is RuntimeError
        assert isinstance(third, EngineDead) and isinstance(last, EngineDead) and isinstance(reply, EngineDead)
        assert served.client.is_dead and "in a row" in str(served.client.error())


class Pair:
    """An engine of two models on the test's own thread: the first one has a row, whose step in flight will fail."""

    def __init__(self) -> None:
        paths = [str(checkpoint(name)) for name in ("qwen3", "llama")]
        self.engine = load_engines([
            Source(name=path, config=EngineConfig(model=path, memory_budget_bytes=4 << 30),
                   checkpoint=find_checkpoint(path))
            for path in paths
        ])  # fmt: skip
        self.driver = Driver(checkpoint("qwen3"))
        self.driver.engine = self.engine

    @property
    def reply(self) -> Reply:
        return self.driver.replies[0]

    def play(self, work: Callable[["Pair"], None], text: str) -> None:
        self.driver.add(PROMPT, LENGTH)
        with failing_device(self.engine.runner) as device:
            while len(self.reply.token_ids) < 4:
                self.driver.step()
            device.fail([0], text, is_late=True)
            self.driver.step()
            assert device.num_failed == 1, "the step in flight"
            work(self)
            self.driver.run()

    def move(self, until: str) -> None:
        while self.engine.models[1].state != until:
            self.engine.move()


def unload(pair: Pair) -> None:
    pair.engine.ask(lambda engine: engine.unload(engine.models[1]))
    pair.move("unloaded")


def break_a_step(pair: Pair) -> None:
    """A step of the second model fails by an error of our own."""

    def broken(now: float = 0.0) -> None:
        raise TypeError("no plan today")

    pair.engine.models[1].scheduler.schedule = broken  # type: ignore[method-assign,assignment]
    pair.engine.step(pair.engine.models[1])


@pytest.mark.parametrize(("work", "text"), [(unload, INTERACTIVITY), (break_a_step, OUT_OF_MEMORY)])
def test_a_row_in_flight_is_as_alone_whatever_another_model_does(work: Callable[[Pair], None], text: str) -> None:
    pair = Pair()
    pair.play(work, text)
    assert pair.reply.error is None
    assert pair.reply.token_ids == plain_loop(checkpoint("qwen3"), PROMPT, LENGTH)[0]


@pytest.mark.parametrize("text", [INTERACTIVITY, OUT_OF_MEMORY])
def test_nor_does_a_load_take_its_fault(text: str) -> None:
    """The load fails by it, and the row begins again."""
    pair = Pair()
    unload(pair)
    model, path = pair.engine.models[1], Path(pair.engine.models[1].facts.info.model)

    def begin() -> object:
        return begin_loading(find_checkpoint(str(path)), trust_remote_code=False, slice_bytes=40_000)

    model.assembly.begin = begin  # type: ignore[assignment,method-assign]

    def load(pair: Pair) -> None:
        pair.engine.ask(lambda engine: engine.load(model))
        pair.move("failed")

    pair.play(load, text)
    assert pair.reply.error is None
    assert pair.reply.token_ids == plain_loop(checkpoint("qwen3"), PROMPT, LENGTH)[0]


@pytest.mark.parametrize("text", [NO_BUFFER, OUT_OF_MEMORY])
def test_loads_without_memory_while_nothing_runs_do_not_end_the_engine(text: str) -> None:
    pair = Pair()
    unload(pair)
    with failing_device(pair.engine.runner) as device:
        for _ in range(MAX_FAULTS + 1):
            device.fail_next("other", 1, text)
            pair.engine.ask(lambda engine: engine.load(engine.models[1]))
            while pair.engine.models[1].state == "loading":
                pair.engine.move()
    assert pair.driver.generate([PROMPT], max_tokens=LENGTH) == [plain_loop(checkpoint("qwen3"), PROMPT, LENGTH)[0]]
