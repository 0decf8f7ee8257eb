"""Clients that leave in the middle of a reply: only what a next turn can contain of it stays in the prefix cache."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.prompt.turns import TOOLS, system, user
from tests.support.rows import cases, row
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.stats import Entry
from vllm_mlx.core.events import GenerationEvent, PromptProgress, ReasoningDelta, TextDelta, ToolCallStart
from vllm_mlx.core.messages import Message, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.engine.client import EngineClient

from .agent import ask, prose, settled

ARCHITECTURES = ["qwen3", "qwen3_5", "gemma3_text"]  # all that was seen can be resumed, copies only, or a window
NUM_SEEN = 20  # tokens of a thought or a text before the client leaves
START = (system(prose(20)), user(prose(3)))


@dataclass(frozen=True)
class Left:
    request: Request
    reply: Message  # as far as the client received it
    num_prompt_tokens: int
    entries: list[Entry]

    @property
    def num_stored(self) -> int:
        return sum(entry.end - entry.start for entry in self.entries)

    @property
    def next_turn(self) -> Request:
        """As an agent goes on: with what it received, and results for calls that it did not make."""
        calls = [part for part in self.reply.parts if isinstance(part, ToolCallPart)]
        results = [
            Message("tool", (ToolResultPart(call.call_id, (TextPart("Aborted."),), call.name),)) for call in calls
        ]
        messages = (*START, self.reply, *(results or [user("And now?")]))
        return request(messages)


def request(messages: tuple[Message, ...] = START) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=200)
    return Request(request_id="r", messages=messages, tools=TOOLS, sampling=sampling)


async def leave(engine: EngineClient, kind: type[GenerationEvent], num_events: int) -> Left:
    async with await engine.submit(request()) as generation:
        num_seen = 0
        async for _, event in generation:
            num_seen += isinstance(event, kind)
            if num_seen == num_events:
                break
        [choice] = generation.by_sequence.values()
    _, entries = await settled(engine)
    return Left(request(), choice.finished.message, choice.seq.num_prompt_tokens, entries)


async def num_reached(engine: EngineClient, left: Left, *requests: Request) -> int:
    """Stored tokens that one of these requests begins with."""
    prompts = [pack(engine.processor.prepare(each).prompt.token_ids) for each in requests]
    space = left.entries[0].space
    return await engine.ask(lambda loaded: max(loaded.cache_tree.common_length(space, key) for key in prompts))


@row("S1-10")
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("gemma3_text", "after the last question"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen3_5", "strips reasoning"),
                ("gemma3_text", "strips reasoning"),
                ("qwen3_5", "after the last question"),
                ("qwen3", "after the last question"),
                ("qwen3", "strips reasoning"),
            )
        ),
    ],
)
def test_a_thought_that_no_next_turn_contains_leaves_nothing(
    engine_with: Callable[..., EngineClient], architecture: str, variant: str
) -> None:
    engine = engine_with(architecture, variant, thought_tokens=60)

    async def run() -> tuple[Left, int]:
        left = await leave(engine, ReasoningDelta, NUM_SEEN)
        row, _ = await ask(engine, left.request)
        return left, row.num_cached_tokens

    left, num_cached = asyncio.run(run())
    assert max(entry.end for entry in left.entries) <= left.num_prompt_tokens
    assert num_cached == left.num_prompt_tokens - 1, "the same request again computes one token of its prompt"


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3_5"]))
def test_a_thought_that_the_template_keeps_is_not_computed_again(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "keeps reasoning", thought_tokens=60)

    async def run() -> tuple[Left, int, int]:
        left = await leave(engine, ReasoningDelta, NUM_SEEN)
        reached = await num_reached(engine, left, left.next_turn)
        row, _ = await ask(engine, left.next_turn)
        return left, reached, row.num_cached_tokens

    left, reached, num_cached = asyncio.run(run())
    assert left.num_stored == reached
    if architecture == "qwen3":  # others resume where state was copied, which is a token further on
        assert num_cached == reached >= left.num_prompt_tokens + NUM_SEEN


@row("S1-6")
@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3_5"]))
def test_a_text_stays_as_far_as_the_client_received_it(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "keeps reasoning", thought_tokens=60, reasoning_parser="none")

    async def run() -> tuple[Left, int, int]:
        left = await leave(engine, TextDelta, NUM_SEEN)
        reached = await num_reached(engine, left, left.next_turn, left.request)
        row, _ = await ask(engine, left.next_turn)
        return left, reached, row.num_cached_tokens

    left, reached, num_cached = asyncio.run(run())
    assert any(isinstance(part, TextPart) for part in left.reply.parts)
    assert left.num_stored == reached
    if architecture == "qwen3":
        assert num_cached == reached >= left.num_prompt_tokens + NUM_SEEN


@pytest.mark.full  # with every run: a text
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_call_stays_as_far_as_an_agent_sends_it_back(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "after the last question", thought_tokens=30)

    async def run() -> tuple[Left, int]:
        left = await leave(engine, ToolCallStart, 1)
        return left, await num_reached(engine, left, left.next_turn, left.request)

    left, reached = asyncio.run(run())
    assert any(isinstance(part, ToolCallPart) for part in left.reply.parts)
    assert left.num_stored == reached


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3_5"]))
def test_a_prompt_that_was_not_read_to_its_end_stays_as_far_as_it_was(
    engine_with: Callable[..., EngineClient], architecture: str
) -> None:
    engine = engine_with(architecture, "strips reasoning", max_prefill_chunk=64)

    async def run() -> tuple[Left, int]:
        left = await leave(engine, PromptProgress, 3)
        row, _ = await ask(engine, left.request)
        return left, row.num_cached_tokens

    left, num_cached = asyncio.run(run())
    assert 0 < left.num_stored <= left.num_prompt_tokens
    assert num_cached == min(left.num_stored, left.num_prompt_tokens - 1)


def test_a_stop_right_after_a_reply_writes_only_what_a_next_turn_can_contain(
    engine_with: Callable[..., EngineClient], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"cache_dir": str(tmp_path_factory.mktemp("cache") / "kept"), "cache_disk_bytes": 1 << 30}
    num_kept: list[int] = []

    async def first() -> int:
        engine = engine_with("qwen3", "strips reasoning", thought_tokens=60, calls=False, **disk)
        kept_tokens = engine.processor.kept_tokens

        def later(*args: Any) -> int:
            time.sleep(0.5)  # the shutdown begins meanwhile
            num_kept.append(kept_tokens(*args))
            return num_kept[0]

        monkeypatch.setattr(engine.processor, "kept_tokens", later)
        row, _ = await ask(engine, request())
        await engine.shutdown(0)
        return row.num_tokens

    async def second() -> int:
        engine = engine_with("qwen3", "strips reasoning", calls=False, **disk)
        while not (entries := await engine.disk_entries()):
            await asyncio.sleep(0.01)
        return max(entry.end for entry in entries)

    num_tokens = asyncio.run(first())
    assert asyncio.run(second()) == num_kept[0] < num_tokens - 60
