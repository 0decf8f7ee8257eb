"""Rates and latencies of the last minutes, sampled from the engine. Knows no HTTP."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ..core.errors import EngineDead
from ..engine.monitoring.schema import EngineFigures
from ..util.fence import Fence
from .schema import Sample, StatusHistory

SAMPLE_EVERY_S = 2.0
HISTORY_S = 600.0


class History:
    """Samples of the last minutes, for clients that begin to watch later: bounded, in memory."""

    def __init__(self, *, every_s: float = SAMPLE_EVERY_S, span_s: float = HISTORY_S) -> None:
        self.every_s = every_s
        self._samples: deque[Sample] = deque(maxlen=int(span_s / every_s))

    @asynccontextmanager
    async def following(self, ask: Callable[[], Awaitable[EngineFigures]]) -> AsyncIterator[None]:
        """Take samples of the result of `ask`, as long as the block lasts and the engine lives."""
        task = asyncio.create_task(self._follow(ask))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, ask: Callable[[], Awaitable[EngineFigures]]) -> None:
        while True:
            with Fence("the history, which goes on with its next sample"):
                try:
                    self.add(await ask(), time.time())
                except EngineDead:
                    return
            await asyncio.sleep(self.every_s)

    def add(self, figures: EngineFigures, unix_s: float) -> None:
        latency = figures["latency"]
        self._samples.append(
            {
                "time": round(unix_s, 3),
                "generation_tps": figures["generation_tps"],
                "prompt_tps": figures["prompt_tps"],
                "num_running": figures["num_running"],
                "num_waiting": figures["num_waiting"],
                "ttft_p50_s": latency["ttft_s"]["p50"],
                "inter_token_p50_s": latency["inter_token_s"]["p50"],
                "inter_token_p99_s": latency["inter_token_s"]["p99"],
            }
        )

    def told(self, unix_s: float) -> StatusHistory:
        """Return the samples, oldest first, as of `unix_s`."""
        age_s = round(max(0.0, unix_s - self._samples[-1]["time"]), 3) if self._samples else None
        return {"object": "list", "every_s": self.every_s, "age_s": age_s, "data": list(self._samples)}
