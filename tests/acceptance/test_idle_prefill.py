"""Between two questions, the next prompt's beginning is computed if the template writes the last turn differently."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.prompt.turns import user
from tests.support.rows import cases
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.events import Failed, ReasoningDelta
from vllm_mlx.core.memory import Pressure, SystemMemory
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.prompt.encoded import common_prefix

from .agent import Agent, Ledger, ask, prose, settled

GREEDY = SamplingParams(temperature=0, max_tokens=100)
FEW = 16  # tokens that may be computed again
ARCHITECTURES = ("qwen3", "qwen3_5", "gemma3_text")


def run_of_calls(agent: Agent, num_calls: int = 20) -> None:
    """Let the agent have asked, thought and called before its present turn."""
    agent.messages.append(user(prose(5)))
    for number in range(num_calls):
        call = ToolCallPart(f"call_{number}", "read", {"path": f"{number}.py"})
        agent.messages.append(Message("assistant", (ReasoningPart(prose(4, number)), call)))
        agent.messages.append(
            Message("tool", (ToolResultPart(call.call_id, (TextPart(prose(3, number)),), call.name),))
        )


async def rested(engine: EngineClient) -> dict[str, int]:
    """Wait until the engine has nothing to do. Returns the tokens that were computed ahead."""
    await settled(engine)
    while await engine.ask(lambda loaded: loaded.is_busy or loaded.scheduler.ahead.next is not None):
        await asyncio.sleep(0.01)
    return (await engine.status())["ahead_tokens"]


async def answer(engine: EngineClient) -> Agent:
    agent = Agent(engine, Ledger(), instructions=prose(60), sampling=GREEDY)
    run_of_calls(agent)
    _, reply = await ask(engine, agent.request())
    assert reply.has_reasoning and not reply.calls
    agent.messages.append(reply.message)
    return agent


def num_own(engine: EngineClient, agent: Agent) -> int:
    """Tokens of the next prompt that depend on the question."""
    prompts = []
    for text in ("0 or not", "the other"):
        agent.messages.append(user(text))
        prompts.append(engine.processor.prepare(agent.request()).prompt.token_ids)
        agent.messages.pop()
    return len(prompts[1]) - common_prefix(*prompts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_a_pause_a_question_computes_only_itself(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "after the last question", calls=False)

    async def run() -> None:
        agent = await answer(engine)
        computed = await rested(engine)
        own = num_own(engine, agent)
        turn = await agent.ask("the other")
        num_tokens, receipt = turn.row.num_prompt_tokens, turn.row.receipt
        assert num_tokens - turn.cached <= own + FEW, (num_tokens, turn.cached, own)
        assert computed["computed"] > 600 and computed["used"] == computed["wasted"] == 0
        after = await rested(engine)
        assert receipt.ahead_tokens > 600 and after["used"] == receipt.ahead_tokens
        assert (await engine.ask(LLMEngine.report)).lanes[0].row["running"] == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("keeps reasoning", {}),
        ("after the last question", {"idle_prefill": "off"}),
        ("after the last question", {"cache_reasoning": "keep"}),
        ("after the last question", {"prefix_cache": False}),
    ],
)
def test_nothing_is_computed_ahead_where_the_path_goes_on_or_it_is_turned_off(
    engine_with: Callable[..., EngineClient], variant: str, settings: dict
) -> None:
    engine = engine_with("qwen3", variant, calls=False, **settings)

    async def run() -> int:
        await answer(engine)
        return (await rested(engine))["computed"]

    assert asyncio.run(run()) == 0


def under_pressure(engine: LLMEngine) -> None:
    engine.watch.system = lambda: SystemMemory(footprint_bytes=None, pressure=Pressure.WARNING)


async def is_left_out(engine: EngineClient) -> bool:
    await answer(engine)
    await settled(engine)
    await asyncio.sleep(0.5)  # in which it would be computed
    return not (await engine.status())["ahead_tokens"]["computed"]


def test_nothing_is_computed_ahead_on_battery(engine_with, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with("qwen3", "after the last question", calls=False)

    async def run() -> None:
        monkeypatch.setattr("vllm_mlx.engine.engine.is_on_battery", lambda: True)
        assert await is_left_out(engine)
        monkeypatch.setattr("vllm_mlx.engine.engine.is_on_battery", lambda: False)
        assert (await rested(engine))["computed"] > 600

    asyncio.run(run())


def test_nothing_is_computed_ahead_under_memory_pressure(engine_with) -> None:
    engine = engine_with("qwen3", "after the last question", calls=False)

    async def run() -> bool:
        await engine.ask(under_pressure)
        return await is_left_out(engine)

    assert asyncio.run(run())


def test_an_aborted_reply_leaves_nothing_to_compute(engine_with: Callable[..., EngineClient]) -> None:
    engine = engine_with("qwen3", "after the last question", calls=False, thought_tokens=60)

    async def run() -> int:
        agent = Agent(engine, Ledger(), instructions=prose(60), sampling=GREEDY)
        run_of_calls(agent)
        async with await engine.submit(agent.request()) as generation:
            async for _, event in generation:
                if isinstance(event, ReasoningDelta):
                    break
        return (await rested(engine))["computed"]

    assert asyncio.run(run()) == 0


def test_what_was_computed_ahead_is_written_with_its_conversation(tmp_path_factory, engine_with) -> None:
    """And is used after a restart."""
    disk = {"cache_dir": str(tmp_path_factory.mktemp("cache") / "kept"), "cache_disk_bytes": 1 << 30}

    async def first() -> Agent:
        engine = engine_with("qwen3_5", "after the last question", calls=False, **disk)
        agent = await answer(engine)
        await rested(engine)
        await agent.ask("the other")
        await engine.shutdown(0)
        return agent

    agent = asyncio.run(first())

    async def second() -> tuple[int, int]:
        engine = engine_with("qwen3_5", "after the last question", calls=False, **disk)
        row, _ = await ask(engine, agent.request())
        return row.num_prompt_tokens, row.num_cached_tokens

    num_tokens, num_cached = asyncio.run(second())
    assert num_tokens - num_cached < 100


ENDING = SamplingParams(temperature=0, max_tokens=60, stop=("e", "a", "o"))
SEEDS = cases(range(40), [0])


async def wander(engine: EngineClient, seed: int, *, pauses: bool) -> list[tuple[int, ...]]:
    """Talk in five ways: on, from an earlier point, with an edited turn, to an abort, and as another client."""
    chance, replies = random.Random(seed), []
    agents = [Agent(engine, Ledger(), instructions=prose(9), sampling=ENDING, cache_salt=salt) for salt in ("", "b")]
    for number in range(5):
        agent = chance.choice(agents)
        way = chance.choice(("on", "on", "fork", "edit", "abort"))
        if way == "fork":
            agent.messages[chance.randrange(1, len(agent.messages) + 1) :] = []
        elif way == "edit" and len(agent.messages) > 2:
            agent.messages[1] = user(prose(4, number))
        run_of_calls(agent, chance.randrange(1, 5))
        async with await engine.submit(agent.request()) as generation:
            async for _, event in generation:
                assert not isinstance(event, Failed), event
                if way == "abort":
                    break
            [choice] = generation.by_sequence.values()
        if way != "abort":
            replies.append(tuple(choice.finished.token_ids))
            agent.messages.append(choice.finished.message)
        await (rested(engine) if pauses else settled(engine))
    return replies


@pytest.mark.parametrize("seed", SEEDS)
def test_replies_are_the_same_with_and_without(checkpoint: Callable[..., Path], seed: int) -> None:
    """In five random conversations of each architecture, with the tokens that were computed ahead of use."""
    architecture = ARCHITECTURES[seed % len(ARCHITECTURES)]
    template = TEMPLATE_VARIANTS["after the last question"]
    if architecture.startswith("gemma"):
        template = template.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
    formats = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "tool_grammar": "off"}
    options = {"model": str(checkpoint(architecture)), "memory_budget_bytes": 4 << 30, "chat_template": template}

    async def run(idle_prefill: str) -> tuple[list, dict[str, int]]:
        engine = start_engine(EngineConfig(**options, **formats, idle_prefill=idle_prefill))
        try:
            replies = [await wander(engine, 5 * seed + each, pauses=each % 2 == 0) for each in range(5)]
            return replies, (await engine.status())["ahead_tokens"]
        finally:
            await engine.shutdown(0)

    (ahead, tokens), (plain, none) = asyncio.run(run("auto")), asyncio.run(run("off"))
    assert ahead == plain
    assert tokens["used"] > 0 and tokens["used"] + tokens["wasted"] <= tokens["computed"] and not any(none.values())
