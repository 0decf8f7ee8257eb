"""An engine without a model: it plays scripts of events, and tells what became of every generation."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from vllm_mlx.core.config import EngineConfig, ModelInfo
from vllm_mlx.core.errors import EngineDead, ShuttingDown, VLLMMLXError
from vllm_mlx.core.events import (
    Failed,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from vllm_mlx.core.messages import ReasoningPart, TextPart, ToolCallPart
from vllm_mlx.core.receipt import PromptChange
from vllm_mlx.core.request import Request
from vllm_mlx.engine.admission import AdmissionQueue

from ..api.fakes import FakeTokens

PROMPT_TOKENS = 7


@dataclass(frozen=True)
class Pause:
    """Nothing comes for `seconds`, or until something holds; without either, for ever."""

    seconds: float | None = None
    until: Callable[[], bool] | None = None


Script = Sequence[GenerationEvent | Pause]
Play = Callable[[Request, int], Script]  # (request, choice index) -> what that choice does


def usage(completion_tokens: int = 3, **others: int) -> Usage:
    return Usage(
        **{"prompt_tokens": PROMPT_TOKENS, "cached_tokens": 2, "completion_tokens": completion_tokens, **others}
    )


def finished(reason: FinishReason = FinishReason.STOP, completion_tokens: int = 3) -> Finished:
    return Finished(reason, usage(completion_tokens))


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> Script:
    return (Started(PROMPT_TOKENS, 2), *map(TextDelta, texts), finished(reason, len(texts)))


def hello(request: Request, index: int) -> Script:
    return says("Hel", "lo")


def silent(request: Request, index: int) -> Script:
    return (Pause(),)


def endless(request: Request, index: int) -> Script:
    """It says a word every other millisecond, and falls silent at last."""
    return (
        Started(PROMPT_TOKENS, 0),
        *(step for _ in range(1000) for step in (TextDelta("word "), Pause(0.002))),
        Pause(),
    )


def thinks_and_calls(request: Request, index: int) -> Script:
    """It reasons, says something, and calls two tools."""
    return (
        Started(PROMPT_TOKENS, 2),
        PromptProgress(3, PROMPT_TOKENS),
        ReasoningDelta("Need "),
        ReasoningDelta("files.\n"),
        TextDelta("Looking."),
        ToolCallStart(0, "call_1", "ls"),
        ToolCallDelta(0, '{"path":'),
        ToolCallDelta(0, ' "/"}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call_2", "multi__wait"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
        finished(FinishReason.TOOL_CALLS),
    )


# The reply above, as a client sends it back.
REPLY = (
    ReasoningPart("Need files.\n"),
    TextPart("Looking."),
    ToolCallPart("call_1", "ls", {"path": "/"}),
    ToolCallPart("call_2", "multi__wait", {}),
)


@dataclass
class FakeEngine:
    play: Play = hello
    refuse: VLLMMLXError | None = None
    prepares_for_ever: bool = False
    dead: str | None = None
    prompt_change: PromptChange | None = None
    info: ModelInfo = field(
        default_factory=lambda: ModelInfo(
            model="org/tiny",
            architecture="llama",
            max_model_len=512,
            weights_bytes=1,
            vocab_size=256,
            created=1_700_000_000,
        )
    )
    capabilities: list[str] = field(default_factory=lambda: ["tools", "reasoning"])
    tokenizer: FakeTokens = field(default_factory=FakeTokens)
    requests: list[Request] = field(default_factory=list)
    counted: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    generations: list["FakeGeneration"] = field(default_factory=list)
    shutdowns: list[float] = field(default_factory=list)

    watchers: list[Callable[[bool], None]] = field(default_factory=list)
    queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(EngineConfig(model="tiny"), list))

    @property
    def fronts(self) -> list["FakeEngine"]:
        """Each model's tokenizer and info, as this one."""
        return [self]

    def state_of(self, model: int) -> str:
        return "ready"

    @property
    def is_healthy(self) -> bool:
        return self.dead is None

    @property
    def is_dead(self) -> bool:
        return self.dead is not None

    def watch_preparing(self, changed: Callable[[bool], None]) -> None:
        self.watchers.append(changed)

    def error(self) -> str | None:
        return self.dead

    async def submit(self, request: Request) -> "FakeGeneration":
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.shutdowns:
            raise ShuttingDown
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        if self.prepares_for_ever:
            await asyncio.Event().wait()
        self.running.add(request.request_id)
        generation = FakeGeneration(self, request)
        self.generations.append(generation)
        return generation

    async def count_tokens(self, request: Request) -> int:
        if self.refuse is not None:
            raise self.refuse
        self.counted.append(request)
        return PROMPT_TOKENS

    async def status(self) -> dict[str, object]:
        raise EngineDead("There is no engine to tell of.")

    async def shutdown(self, drain_s: float) -> None:
        self.shutdowns.append(drain_s)
        waits = [generation.ended.wait() for generation in self.generations]
        if waits:
            await asyncio.wait([asyncio.create_task(wait) for wait in waits], timeout=drain_s)
        for generation in self.generations:
            generation.fail(ShuttingDown())


class FakeGeneration:
    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = PROMPT_TOKENS
        self.prompt_change = engine.prompt_change
        self.ended = asyncio.Event()
        self._engine = engine
        self._open = set(range(request.sampling.n))
        self._events: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue()
        self._players = [
            asyncio.create_task(self._play(index, engine.play(request, index))) for index in range(request.sampling.n)
        ]

    async def __aenter__(self) -> "FakeGeneration":
        return self

    async def __aexit__(self, *_: object) -> None:
        for player in self._players:
            player.cancel()
        if self.request_id in self._engine.running:
            outcome = self._engine.aborted if self._open else self._engine.finished
            outcome.append(self.request_id)
            self._engine.running.discard(self.request_id)  # last: tests wait for it
        self.ended.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        while self._open:
            index, event = await self._events.get()
            if isinstance(event, Finished | Failed):
                self._open.discard(index)
            yield index, event

    def fail(self, error: VLLMMLXError) -> None:
        for index in self._open:
            self._events.put_nowait((index, Failed(error)))

    async def _play(self, index: int, script: Script) -> None:
        for step in script:
            if not isinstance(step, Pause):
                await self._events.put((index, step))
                await asyncio.sleep(0)
            elif step.until is not None:
                while not step.until():
                    await asyncio.sleep(0.005)
            elif step.seconds is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(step.seconds)
