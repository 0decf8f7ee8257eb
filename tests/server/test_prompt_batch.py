"""Several prompts in one stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from vllm_mlx.core.events import GenerationEvent, TextDelta
from vllm_mlx.server.generations import PromptBatch

from .fakes import finished


class Talk:
    """A generation of many events."""

    num_prompt_tokens = 7

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        for event in (*[TextDelta("a")] * 200, finished()):
            yield 0, event


def test_a_client_that_leaves_early_leaves_no_reader_behind() -> None:
    async def leave(talks: list[Any]) -> None:
        async with PromptBatch(talks, 1) as batch:
            async for _ in batch:
                for _ in range(200):  # until the queue is full
                    await asyncio.sleep(0)
                return

    asyncio.run(asyncio.wait_for(leave([Talk(), Talk()]), 20))
