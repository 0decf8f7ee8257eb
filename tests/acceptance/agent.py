"""An agent that talks with a running engine turn by turn, and how much of each prompt was known. Knows no protocol."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.prompt.turns import ECHOES, TOOLS, Echo, system, user
from vllm_mlx.cache.stats import Entry
from vllm_mlx.core.events import Failed
from vllm_mlx.core.messages import Message, TextPart, ToolResultPart
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.core.sequence import Sequence as Row
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.monitoring.schema import EngineReport
from vllm_mlx.engine.preparing import TENANT_THREADS
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.prompt.encoded import common_prefix

WORDS = ("read the file and say what it does in detail", "write the tests", "list what is in this folder", "why not")


def prose(num_words: int, seed: int = 0) -> str:
    return " ".join(f"{WORDS[(seed + index) % len(WORDS)]} {seed * 7919 + index}" for index in range(num_words))


@dataclass(frozen=True)
class Turn:
    row: Row
    reply: FinishedReply
    ideal: int  # tokens of the prompt that an earlier prompt or reply began with; never all of it
    gives_results: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.row.prompt.token_ids, *self.row.output_token_ids)

    @property
    def cached(self) -> int:
        return self.row.num_cached_tokens


@dataclass
class Ledger:
    """All ids that an engine has seen or written."""

    known: list[Sequence[int]] = field(default_factory=list)

    def ideal(self, prompt: Sequence[int]) -> int:
        return min(len(prompt) - 1, max((common_prefix(each, prompt) for each in self.known), default=0))


class Agent:
    """One conversation. Replies go back as `echo` alters them; a reply without calls gets a result all the same."""

    def __init__(
        self,
        engine: EngineClient,
        ledger: Ledger,
        *,
        instructions: str,
        echo: Echo = ECHOES["verbatim"],
        sampling: SamplingParams,
        **options: object,
    ):
        self._engine = engine
        self._ledger = ledger
        self._echo = echo
        self._sampling = sampling
        self._options = {"tools": TOOLS, **options}
        self.messages = [system(instructions)]
        self.turns: list[Turn] = []

    def request(self) -> Request:
        sampling = replace(self._sampling, seed=len(self.turns))
        return Request(request_id="r", messages=tuple(self.messages), sampling=sampling, **self._options)

    async def ask(self, text: str) -> Turn:
        self.messages.append(user(text))
        return await self._answer()

    async def give_results(self, text: str) -> Turn:
        """To each call of the last reply; to one that it did not make, if it made none."""
        calls = [(call.call_id, call.name) for call in self.turns[-1].reply.calls]
        for call_id, name in calls or [(f"call_{len(self.turns)}", "read")]:
            self.messages.append(Message("tool", (ToolResultPart(call_id, (TextPart(text),), name),)))
        return await self._answer()

    async def _answer(self) -> Turn:
        row, reply = await ask(self._engine, self.request())
        gives_results = self.messages[-1].role == "tool"
        turn = Turn(row, reply, self._ledger.ideal(row.prompt.token_ids), gives_results)
        self.turns.append(turn)
        self._ledger.known.append(turn.token_ids)
        self.messages.append(self._echo(reply.message))
        return turn

    @property
    def share(self) -> float:
        """Cached, of what could have been."""
        return sum(turn.cached for turn in self.turns) / sum(turn.ideal for turn in self.turns)


async def ask(engine: EngineClient, request: Request) -> tuple[Row, FinishedReply]:
    async with await engine.submit(request) as generation:
        async for _, event in generation:
            assert not isinstance(event, Failed), event
        [choice] = generation.by_sequence.values()
    return choice.seq, choice.finished


async def settled(engine: EngineClient) -> tuple[EngineReport, list[Entry]]:
    """The cache once nothing runs any more and what no next turn needs has gone."""
    meeting = threading.Barrier(TENANT_THREADS)  # of all workers: every trim that was under way is done
    workers = [engine.pool.submit(meeting.wait) for _ in range(meeting.parties)]
    await asyncio.gather(*map(asyncio.wrap_future, workers))
    while (await engine.ask(LLMEngine.report)).lanes[0].row["running"]:
        await asyncio.sleep(0.01)
    while await engine.ask(lambda loaded: loaded.has_work):
        pass  # the trims are done in a step that has nothing else to do
    return await engine.ask(LLMEngine.report), await engine.cache_entries()
