"""Long tool conversations: what of a prompt was known is not computed again, however the client sent replies back."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from scripts._bench import thoughts
from scripts.served import MODEL_NAME
from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.prompt.turns import ECHOES, Echo, user
from tests.server.watched import engine_served
from tests.support.checkpoints import MARKER_TOKENS
from tests.support.rote import rote_checkpoint
from tests.support.rows import cases, row
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.stats import Entry
from vllm_mlx.cli.bench import Words
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.core.sequence import Sequence as Row
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.engine.monitoring.schema import EngineReport
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.scheduler.prefix_planner import MIN_SHARED_TOKENS

from .agent import Agent, Ledger, Turn, prose, settled

NUM_TURNS = 20
LONG_THOUGHTS = [60, pytest.param(300, marks=pytest.mark.full)]  # tokens
MAX_STATES = 6
QUESTION_EVERY = 5  # turns; results of calls between
GREEDY = SamplingParams(temperature=0, max_tokens=400)
ARCHITECTURES = ("qwen3", "qwen3_5", "gemma3_text")


def as_many_clients_do(message):
    for name in ("reasoning dropped", "arguments with defaults", "text trimmed"):
        message = ECHOES[name](message)
    return message


async def converse(engine: EngineClient, *, echo: Echo, num_turns: int, words: int, question_every: int) -> Agent:
    agent = Agent(engine, Ledger(), instructions=prose(words), echo=echo, sampling=GREEDY)
    for number in range(num_turns):
        turn: Turn
        if number % question_every:
            turn = await agent.give_results(prose(3, number))
        else:
            turn = await agent.ask(prose(3, number))
        assert len(turn.reply.calls) == 1 and turn.reply.has_reasoning
    return agent


def assert_replies_stand_as_sampled(agent: Agent) -> None:
    """In the prompts that go on from them without a new question."""
    for earlier, turn in pairwise(agent.turns):
        if turn.gives_results:
            assert turn.ideal >= len(earlier.token_ids) - 1


def assert_all_known_was_cached(agent: Agent) -> None:
    shares = [(turn.cached, turn.ideal, len(turn.row.prompt.token_ids)) for turn in agent.turns]
    assert agent.share >= 0.99, shares


CASES = [
    pytest.param("qwen3", "after the last question", marks=pytest.mark.full),
    pytest.param("gemma3_text", "after the last question", marks=pytest.mark.full),
    pytest.param("qwen3_5", "after the last question", marks=pytest.mark.full),
    ("qwen3_5", "keeps reasoning"),
]


@row("S0-12")
@pytest.mark.parametrize("num_turns", [NUM_TURNS // 2, pytest.param(NUM_TURNS, marks=pytest.mark.full)])
@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_many_turns_with_tools(
    engine_with: Callable[..., EngineClient], architecture: str, variant: str, num_turns: int
) -> None:
    engine = engine_with(architecture, variant)
    agent = asyncio.run(
        converse(engine, echo=as_many_clients_do, num_turns=num_turns, words=30, question_every=QUESTION_EVERY)
    )
    assert_replies_stand_as_sampled(agent)
    assert_all_known_was_cached(agent)


@pytest.mark.full
@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("variant", ["keeps reasoning", "strips reasoning", "after the last question"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_twenty_turns_of_every_client(
    engine_with: Callable[..., EngineClient], architecture: str, variant: str, echo: str
) -> None:
    engine = engine_with(architecture, variant)
    agent = asyncio.run(
        converse(engine, echo=ECHOES[echo], num_turns=NUM_TURNS, words=100, question_every=QUESTION_EVERY)
    )
    if variant != "strips reasoning":
        assert_replies_stand_as_sampled(agent)
    assert_all_known_was_cached(agent)


def test_several_replies_to_one_new_prompt_compute_it_once(engine_with: Callable[..., EngineClient]) -> None:
    engine = engine_with("qwen3_5", "keeps reasoning")
    sampling = SamplingParams(temperature=0, max_tokens=4, n=4)
    request = Request(request_id="r", messages=(user(prose(100)),), sampling=sampling)
    rows = asyncio.run(rows_of(engine, request))
    cached = sorted(row.num_cached_tokens for row in rows)
    length = rows[0].num_prompt_tokens
    assert cached[0] == 0 and all(length - each < MIN_SHARED_TOKENS for each in cached[1:]), (cached, length)


# Bytes after ten turns: (words of the system prompt, marks)
SIZES = [pytest.param(150, id="3k"), pytest.param(1500, id="30k", marks=[pytest.mark.full, pytest.mark.timeout(1800)])]


@row("S1-10", "S4-19")
@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_ten_turns_hold_each_token_once(
    engine_with: Callable[..., EngineClient], architecture: str, words: int
) -> None:
    engine = engine_with(architecture, "after the last question")

    async def run() -> tuple[Agent, EngineReport, list[Entry]]:
        agent = await converse(engine, echo=as_many_clients_do, num_turns=10, words=words, question_every=10)
        return agent, *await settled(engine)

    agent, report, entries = asyncio.run(run())
    assert_all_known_was_cached(agent)
    footprint = engine.fronts[0].facts.footprint
    once = footprint.bytes_per_token * len(agent.turns[-1].token_ids)
    assert report.cache is not None
    states = sum(entry.state_bytes for entry in entries)
    assert report.cache.num_states <= MAX_STATES and states <= MAX_STATES * footprint.fixed_bytes
    assert report.cache.used_bytes - states <= 1.1 * once


@row("S1-2")
@pytest.mark.parametrize("thought_tokens", LONG_THOUGHTS)
@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3_5"]))
def test_thoughts_that_the_template_strips_leave_nothing_behind(
    engine_with: Callable[..., EngineClient], architecture: str, thought_tokens: int
) -> None:
    engine = engine_with(architecture, "strips reasoning", thought_tokens=thought_tokens)

    async def run() -> tuple[int, int]:
        agent = await converse(engine, echo=ECHOES["verbatim"], num_turns=6, words=8, question_every=3)
        _, entries = await settled(engine)
        agent.messages.append(user("And now?"))
        prompt = engine.processor.prepare(agent.request()).prompt.token_ids
        space = entries[0].space
        common = await engine.ask(lambda loaded: loaded.cache_tree.common_length(space, pack(prompt)))
        return sum(entry.end - entry.start for entry in entries), common

    stored, reachable = asyncio.run(run())
    assert stored == reachable


@row("S1-6")
@pytest.mark.parametrize("policy", cases(["auto", "drop"], ["drop"]))
def test_reasoning_that_is_part_of_the_text_stays(engine_with: Callable[..., EngineClient], policy: str) -> None:
    parser = "minimax_m2_append_think"
    engine = engine_with("qwen3", "strips reasoning", reasoning_parser=parser, cache_reasoning=policy)

    async def run() -> Agent:
        agent = Agent(engine, Ledger(), instructions=prose(8), sampling=GREEDY)
        for number in range(4):
            await agent.ask(prose(3, number))
        return agent

    agent = asyncio.run(run())
    for turn in agent.turns:
        assert "<think>" in turn.reply.message.parts[0].text and not turn.reply.has_reasoning
    for earlier, turn in pairwise(agent.turns):
        assert turn.cached >= len(earlier.token_ids) - 1


@row("S1-5")
@pytest.mark.parametrize(
    ("policy", "asked", "is_kept"),
    [
        pytest.param("auto", True, True, marks=pytest.mark.full),
        ("drop", True, True),
        pytest.param("keep", None, True, marks=pytest.mark.full),
        ("keep", False, False),
    ],
)
def test_a_request_overrules_the_policy(
    engine_with: Callable[..., EngineClient], policy: str, asked: bool | None, is_kept: bool
) -> None:
    engine = engine_with("qwen3", "strips reasoning", cache_reasoning=policy)

    async def run() -> tuple[Turn, list[Entry]]:
        agent = Agent(engine, Ledger(), instructions=prose(8), sampling=GREEDY, keeps_reasoning=asked)
        turn = await agent.ask(prose(3))
        return turn, (await settled(engine))[1]

    turn, entries = asyncio.run(run())
    stored = max(entry.end for entry in entries)
    assert turn.reply.has_reasoning and len(turn.row.output_token_ids) > 12
    assert stored >= len(turn.token_ids) - 1 if is_kept else stored <= len(turn.row.prompt.token_ids)


@row("S1-7")
@pytest.mark.parametrize("policy", cases(["auto", "drop"], ["drop"]))
def test_a_reply_without_reasoning_stays(checkpoint: Callable[..., Path], policy: str) -> None:
    """In the cache of a model that reasons when it likes, and did not."""
    path = checkpoint("qwen3")
    config = EngineConfig(
        model=str(path),
        memory_budget_bytes=2 << 30,
        chat_template=TEMPLATE_VARIANTS["strips reasoning"],
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        cache_reasoning=policy,
    )
    tokenizer = Tokenizer.load(path)
    banned = {token_id: -100.0 for tag in MARKER_TOKENS if (token_id := tokenizer.token_id(tag)) is not None}
    engine = start_engine(config)

    async def run() -> Agent:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=banned)
        agent = Agent(engine, Ledger(), instructions=prose(8), sampling=sampling)
        for number in range(3):
            await agent.ask(prose(3, number))
            await settled(engine)
        await engine.shutdown(0)
        return agent

    agent = asyncio.run(run())
    assert not any(turn.reply.has_reasoning for turn in agent.turns)
    for earlier, turn in pairwise(agent.turns):
        assert turn.cached == len(earlier.token_ids) - 1


@row("S1-11")
@pytest.mark.parametrize(
    "kinds", [(thoughts.QUESTIONS,), pytest.param((thoughts.QUESTIONS, thoughts.TOOL_LOOP), marks=pytest.mark.full)]
)
def test_the_benchmark_compares_the_policies(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    path = rote_checkpoint(tmp_path, "qwen3", thought_tokens=24)
    size = thoughts.Size(num_turns=2, num_conversations=dict.fromkeys(kinds, 1))
    with contextlib.ExitStack() as stack:
        loads = {}
        for subject, policy in thoughts.POLICIES.items():
            options = {"served_model_names": (MODEL_NAME,)}
            running = stack.enter_context(
                engine_served(path, options=options, cache_reasoning=policy, tool_grammar="off")
            )
            loads[subject] = thoughts.PolicyLoad(running.port, Words(0), size)
        values = {
            figure.name: {subject: measure() for subject, measure in figure.measures.items()}
            for figure in thoughts.figures(loads)
            if figure.name.partition(",")[0] in kinds
        }
    auto, keep, drop = thoughts.POLICIES
    names = {
        f"{kind}, {name}" for kind in size.num_conversations for name in ("hit rate", "TTFT p50", "held at the end")
    }
    assert names == values.keys() and all(value > 0 for row in values.values() for value in row.values())
    assert values["questions, hit rate"][auto] == values["questions, hit rate"][keep]
    assert values["questions, held at the end"][auto] < values["questions, held at the end"][keep]
    if thoughts.TOOL_LOOP in kinds:
        assert values["tool loop, hit rate"][auto] == values["tool loop, hit rate"][keep]
        assert values["tool loop, hit rate"][auto] > values["tool loop, hit rate"][drop]


@row("S1-12")
@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_thoughts_that_the_template_keeps_are_not_computed_again(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "after the last question", thought_tokens=300)
    agent = asyncio.run(converse(engine, echo=as_many_clients_do, num_turns=10, words=8, question_every=10))
    assert_replies_stand_as_sampled(agent)
    assert all(turn.cached >= 0.99 * turn.ideal for turn in agent.turns)


async def rows_of(engine: EngineClient, request: Request) -> list[Row]:
    async with await engine.submit(request) as generation:
        async for _ in generation:
            pass
        return [choice.seq for choice in generation.by_sequence.values()]
