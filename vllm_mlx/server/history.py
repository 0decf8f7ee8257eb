"""The figures of the last minutes, for who comes to watch later: a sample every few seconds, bounded, in memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..core.errors import EngineDead

EVERY_S = 2.0
SPAN_S = 600.0

Status = Mapping[str, Any]


class History:
    def __init__(self, *, every_s: float = EVERY_S, span_s: float = SPAN_S) -> None:
        self.every_s = every_s
        self._samples: deque[dict[str, Any]] = deque(maxlen=int(span_s / every_s))

    @asynccontextmanager
    async def following(self, ask: Callable[[], Awaitable[Status]]) -> AsyncIterator[None]:
        """Takes samples of what `ask` returns, for as long as the block lasts and the engine lives."""
        task = asyncio.create_task(self._follow(ask))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, ask: Callable[[], Awaitable[Status]]) -> None:
        try:
            while True:
                self.add(await ask())
                await asyncio.sleep(self.every_s)
        except EngineDead:
            return

    def add(self, status: Status) -> None:
        latency = status["latency"]
        self._samples.append(
            {
                "time": status["time"],
                "generation_tps": status["generation_tps"],
                "prompt_tps": status["prompt_tps"],
                "num_running": status["num_running"],
                "num_waiting": status["num_waiting"],
                "ttft_p50_s": latency["ttft_s"]["p50"],
                "inter_token_p50_s": latency["inter_token_s"]["p50"],
                "inter_token_p99_s": latency["inter_token_s"]["p99"],
            }
        )

    def samples(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(self._samples)
