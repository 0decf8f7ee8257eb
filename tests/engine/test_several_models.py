"""Several models share one engine thread, one tree, one disk and one pool of memory, and every reply is as alone."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.tight_models import Watch
from vllm_mlx.api.replies import FoldedChoice
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.core.errors import ConfigError, ModelUnavailable
from vllm_mlx.core.events import Failed
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import open_disk, start_engine

NAMES = ("qwen3", "qwen3_5", "gpt_oss")
HEADED = "qwen3_5 with an MTP head"
NUM_TOKENS = 10
NUM_ASKED = 12


def prompt_of(number: int, length: int = 300) -> list[int]:
    return [7 + (number * 31 + 5 * place * place + 3 * place) % 180 for place in range(length)]


class Serving:
    def __init__(self, client: EngineClient):
        self.client, self.num_asked = client, 0

    async def ask(self, model: int, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[list[int], int]:
        """Return the reply, and how many tokens of the prompt were cached."""
        self.num_asked += 1
        choice = FoldedChoice()
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, skip_special_tokens=False
        )
        request = Request(request_id=f"{self.num_asked}", prompt=tuple(prompt), sampling=sampling, model=model)
        async with await self.client.submit(request) as generation:
            async for _, event in generation:
                if isinstance(event, Failed):
                    raise event.error
                choice.feed(event)
        return [entry.token_id for entry in choice.logprobs or ()], choice.finished.usage.cached_tokens

    async def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in (await self.client.status())["models"]]


def path_of(name: str) -> str:
    return str(checkpoint("qwen3_5", mtp=True) if name == HEADED else checkpoint(name))


def catalogue(*names: str, pin: bool = False, max_model_len: int | None = 2048) -> Catalogue:
    return Catalogue(
        tuple(
            Entry(config=ModelConfig(model=path_of(name), max_model_len=max_model_len), name=name, pin=pin)
            for name in names
        )
    )


@contextmanager
def serving(
    *names: str,
    folder: Path | None = None,
    max_model_len: int | None = 2048,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> Iterator[tuple[Serving, asyncio.Runner]]:
    models = catalogue(*names, max_model_len=max_model_len)
    disk: dict[str, Any] = {} if folder is None else {"cache_dir": str(folder), "cache_disk_bytes": 1 << 30}
    config = EngineConfig(model=models.entries[0].config.model, **{"memory_budget_bytes": 2 << 30, **disk, **settings})
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        served = Serving(start_engine(config, None if folder is None else open_disk(config), models))
        try:
            yield served, runner
        finally:
            runner.run(served.client.shutdown(0))


Asked = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def asked() -> tuple[Asked, list[list[int]]]:
    """Prompts of all models, in a drawn order, and the reply of each model alone."""
    order = [(number % len(NAMES), prompt_of(number // 3 % 3, 140 + 20 * (number % 4))) for number in range(NUM_ASKED)]
    random.Random(7).shuffle(order)
    alone: dict[int, list[int]] = {}
    for model, name in enumerate(NAMES):
        own = [(at, prompt) for at, (of, prompt) in enumerate(order) if of == model]
        alone |= {at: plain_loop(checkpoint(name), prompt, NUM_TOKENS)[0] for at, prompt in own}
    return order, [alone[at] for at in range(len(order))]


@pytest.mark.full  # with every run: models that take turns
def test_every_reply_is_as_alone(asked: tuple[Asked, list[list[int]]]) -> None:
    order, alone = asked
    with serving(*NAMES) as (served, runner):

        async def ask_all() -> list[tuple[list[int], int]]:
            return await asyncio.gather(*(served.ask(model, prompt) for model, prompt in order))

        assert [reply for reply, _ in runner.run(ask_all())] == alone
        rows = runner.run(served.rows())
        assert [(row["name"], row["state"]) for row in rows] == [(name, "ready") for name in NAMES]
        status = runner.run(served.client.status())
        assert status["memory"]["weights_bytes"] == sum(row["weights_bytes"] for row in rows)
        assert status["outcomes"]["length"] == NUM_ASKED and status["num_preemptions"] == 0


def test_each_model_resumes_its_own_conversations_also_from_disk(tmp_path: Path) -> None:
    first, longer = prompt_of(1), [*prompt_of(1), 11, 12, 13]
    for start in range(2):
        with serving("qwen3", "qwen3_5", folder=tmp_path) as (served, runner):
            for model, name in enumerate(("qwen3", "qwen3_5")):
                if not start:
                    assert runner.run(served.ask(model, first))[1] == 0, "models share no state"
                reply, num_cached = runner.run(served.ask(model, longer))
                assert reply == plain_loop(checkpoint(name), longer, NUM_TOKENS)[0]
                assert num_cached >= 0.99 * len(first)


def test_what_cannot_fit_beside_the_pinned_models_is_refused_with_the_arithmetic() -> None:
    models = catalogue("qwen3", "qwen3_5", pin=True)
    config = EngineConfig(model=models.entries[0].config.model, memory_budget_bytes=3_000_000)
    with pytest.raises(ConfigError, match=r"^\S+: Too little memory: .* of which other models hold"):
        start_engine(config, None, models)


# Three models take 4.1 MB and a step 3.3 MB, so that a prompt has room beside two of them only.
TIGHT = {"memory_budget_bytes": 7_800_000, "max_prefill_chunk": 64}


def test_models_that_do_not_fit_take_turns_and_every_reply_is_as_alone(asked: tuple[Asked, list[list[int]]]) -> None:
    order, alone = asked
    with serving(*NAMES, **TIGHT) as (served, runner):

        async def ask_all() -> list[tuple[list[int], int]]:
            places = asyncio.Semaphore(8)

            async def ask(model: int, prompt: list[int]) -> tuple[list[int], int]:
                async with places:
                    return await served.ask(model, prompt)

            return await asyncio.gather(*(ask(model, prompt) for model, prompt in order))

        assert [reply for reply, _ in runner.run(ask_all())] == alone
        status = runner.run(served.client.status())
        num_loads = sum(row["loads"]["request"] for row in status["models"])
        assert 0 < num_loads <= 16 and status["outcomes"]["length"] == NUM_ASKED
        assert status["outcomes"]["failed"] == status["outcomes"]["aborted"] == 0


def test_no_model_leaves_in_vain_while_a_running_reply_holds_what_another_one_lacks() -> None:
    """All three are in memory but for the first, whose row and weights lack more than the second one has."""
    with serving(*NAMES, **(TIGHT | {"memory_budget_bytes": 9_000_000})) as (served, runner):
        for model in (1, 2):
            runner.run(served.ask(model, prompt_of(1)))
        runner.run(served.client.unload_model(0, wait=True))
        runner.run(served.client.load_model(1, wait=True))
        runner.run(served.client.ask(be_patient))

        async def states() -> list[str]:
            return [row["state"] for row in await served.rows()]

        async def ask_both() -> None:
            running = asyncio.create_task(served.ask(2, prompt_of(2), 1700))
            while not (await served.rows())[2]["running"]:
                await asyncio.sleep(0.005)
            waiting = asyncio.create_task(served.ask(0, prompt_of(3), 1700))
            while not (await served.rows())[0]["waiting"]:
                await asyncio.sleep(0.005)
            for _ in range(3):
                await served.client.ask(lambda engine: None)  # between two steps
            assert await states() == ["unloaded", "ready", "ready"]
            running.cancel()
            while (await states())[0] != "ready":
                await asyncio.sleep(0.005)
            assert await states() == ["ready", "unloaded", "ready"]
            waiting.cancel()
            await asyncio.wait([running, waiting])

        runner.run(ask_both())


def be_patient(engine: LLMEngine) -> None:
    """Let no sequence wait so long that a busy model leaves for it."""
    for model in engine.models:
        model.load_s = 1e6


def test_the_default_stays_at_a_start_and_another_model_that_has_no_room_is_not_loaded() -> None:
    tight = {"memory_budget_bytes": 3_800_000, "max_prefill_chunk": 64, "max_model_len": 256}
    with serving("qwen3", "qwen3_5", **tight) as (served, runner):
        rows = runner.run(served.rows())
        assert [(row["state"], row["loads"]["start"]) for row in rows] == [("ready", 1), ("unloaded", 0)]


def test_a_model_that_needs_all_memory_is_loaded_by_a_request_and_by_a_command() -> None:
    """Beside what stays of the other one, less is free than its weights take while they are read."""
    tight = {"memory_budget_bytes": 3_200_000, "max_prefill_chunk": 64, "max_model_len": 64}
    with serving("qwen3", "qwen3_5", **tight) as (served, runner):
        reply, _ = runner.run(served.ask(1, prompt_of(1, 20)))
        assert reply == plain_loop(checkpoint("qwen3_5"), prompt_of(1, 20), NUM_TOKENS)[0]
        for model in (0, 1):
            runner.run(served.client.load_model(model, wait=True))
        assert [row["state"] for row in runner.run(served.rows())] == ["unloaded", "ready"]


def test_two_lone_rows_that_outgrow_the_memory_together_keep_within_it() -> None:
    """The one that came later waits until the first has ended, and goes on with its own tokens."""
    watch = Watch()
    tight = {"memory_budget_bytes": 5_200_000, "max_prefill_chunk": 64, "max_model_len": 512}
    with serving("qwen3", "llama", **tight) as (served, runner):
        runner.run(served.client.ask(watch.begin))
        pool_bytes = runner.run(served.client.ask(free_bytes))
        row = runner.run(served.client.ask(lambda engine: engine.default.facts.footprint))
        prompts = [prompt_of(1, 64), prompt_of(2, 64)]
        num_tokens = row.max_tokens(int(0.6 * pool_bytes)) - 64
        assert 2 * row.bytes_at(64 + num_tokens) > pool_bytes > row.bytes_at(64 + num_tokens) + row.bytes_at(66)

        async def ask_both() -> list[tuple[list[int], int]]:
            both = threading.Event()  # the engine waits until it has both
            held = asyncio.create_task(served.client.ask(lambda engine: both.wait(120)))
            asked = [asyncio.create_task(served.ask(at, prompt, num_tokens)) for at, prompt in enumerate(prompts)]
            while len(served.client.generations) < 2:
                await asyncio.sleep(0.001)
            both.set()
            await held
            return await asyncio.gather(*asked)

        replies = [reply for reply, _ in runner.run(ask_both())]
        status = runner.run(served.client.status())
    expected = [
        plain_loop(checkpoint(name), prompt, num_tokens)[0]
        for name, prompt in zip(("qwen3", "llama"), prompts, strict=True)
    ]
    assert replies == expected and status["num_preemptions"] == 1
    assert watch.most_bytes <= 5_200_000
    assert sum(row["loads"]["request"] for row in status["models"]) == 0


class Ahead(asyncio.SelectorEventLoop):
    """An event loop whose clock the test moves on."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_who_is_held_back_too_long_because_its_own_model_yields_learns_what_is_in_the_way() -> None:
    long = 3500
    tight = {"memory_budget_bytes": 8_400_000, "max_prefill_chunk": 64, "max_model_len": 3600}
    with serving("qwen3", "qwen3_5", loop_factory=Ahead, **tight) as (served, runner):

        async def until(is_so: Callable[[LLMEngine], bool]) -> None:
            while not await served.client.ask(is_so):
                await asyncio.sleep(0.005)

        def load_soon(engine: LLMEngine) -> None:
            engine.models[1].expected_load_s = 0.0

        async def ask_all() -> list[Any]:
            await served.client.ask(load_soon)
            runs = asyncio.create_task(served.ask(0, prompt_of(1, 64), long))
            await until(lambda engine: engine.scheduler.num_running == 1)
            short = asyncio.create_task(served.ask(1, prompt_of(1, 64)))
            await until(lambda engine: engine.default.is_yielding)
            held = asyncio.create_task(served.ask(0, prompt_of(2, 64)))
            await until(lambda engine: len(engine.default.waiting) == 1)
            assert not runs.done()
            asyncio.get_running_loop().ahead_s = 1000.0  # type: ignore[attr-defined]
            ends = await asyncio.gather(short, held, return_exceptions=True)
            runs.cancel()
            return ends

        for end in runner.run(ask_all()):
            assert isinstance(end, ModelUnavailable)
            assert end.message.endswith("(--max-model-wait-s). In memory: qwen3, which runs 1.")


def free_bytes(engine: LLMEngine) -> int:
    return engine.scheduler.pool.planned_bytes - engine.scheduler.room.kept_bytes
