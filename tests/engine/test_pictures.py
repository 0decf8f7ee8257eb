"""Pictures on their way to the tower: who waits for whom."""

import asyncio
import base64
from collections.abc import Iterator

import pytest
from PIL import Image

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import ImagePart, Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.engine.async_engine import AsyncEngine

from ..processing.images.samples import encode
from .vision_harness import picture


@pytest.fixture(scope="module")
def engine(checkpoint) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.start(EngineConfig(model=str(checkpoint("vision:qwen3_vl")), memory_budget_bytes=1 << 30))
    yield engine
    asyncio.run(engine.shutdown(0))


def request(*pictures: int) -> Request:
    files = [encode(Image.fromarray(picture(number).pixels)) for number in pictures]
    shown = [ImagePart("data:image/png;base64," + base64.b64encode(file).decode()) for file in files]
    return Request(request_id="r", messages=(Message("user", (*shown, TextPart("And now?"))),))


def test_texts_and_known_pictures_do_not_wait_behind_pictures_that_are_prepared(engine):
    async def main() -> None:
        num_tokens = await engine.count_tokens(request(1))
        with engine._processor._vision._lock:  # the checkpoint's processor is busy
            waiting = [asyncio.create_task(engine.count_tokens(request(number))) for number in (2, 3, 4, 5)]
            assert await engine.count_tokens(request()) < num_tokens
            assert await engine.count_tokens(request(1)) == num_tokens
            assert not any(task.done() for task in waiting)
        assert min(await asyncio.gather(*waiting)) > await engine.count_tokens(request())

    asyncio.run(main())


def test_a_picture_that_is_asked_for_many_times_at_once_is_one(engine):
    async def main() -> None:
        counts = await asyncio.gather(*(engine.count_tokens(request(7, 8)) for _ in range(12)))
        assert len(set(counts)) == 1

    asyncio.run(main())
