"""Pictures on their way to the tower: who waits for whom."""

import asyncio
import base64
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from PIL import Image

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import Cancelled, InvalidImage
from vllm_mlx.core.messages import ImagePart, Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.engine import preparing
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.media.vision import VisionProcessor
from vllm_mlx.util.tasks import Deadline

from ..media.samples import corners, encode
from .vision_harness import picture


@pytest.fixture(scope="module")
def engine(checkpoint) -> Iterator[EngineClient]:
    engine = start_engine(EngineConfig(model=str(checkpoint("vision:qwen3_vl")), memory_budget_bytes=1 << 30))
    yield engine
    asyncio.run(engine.shutdown(0))


def request(*pictures: int) -> Request:
    files = [encode(Image.fromarray(picture(number).pixels)) for number in pictures]
    shown = [ImagePart("data:image/png;base64," + base64.b64encode(file).decode()) for file in files]
    return Request(request_id="r", messages=(Message("user", (*shown, TextPart("And now?"))),))


def test_texts_and_known_pictures_do_not_wait_behind_pictures_that_are_prepared(engine):
    async def main() -> None:
        num_tokens = await engine.count_tokens(request(1))
        with engine.processor._vision._lock:  # the checkpoint's processor is busy
            waiting = [asyncio.create_task(engine.count_tokens(request(number))) for number in (2, 3, 4, 5)]
            assert await engine.count_tokens(request()) < num_tokens
            assert await engine.count_tokens(request(1)) == num_tokens
            assert not any(task.done() for task in waiting)
        assert min(await asyncio.gather(*waiting)) > await engine.count_tokens(request())

    asyncio.run(main())


def test_a_request_of_many_pictures_lets_another_have_its_own_in_between(engine, monkeypatch):
    alone = [part for part in request(40).messages[0].parts if isinstance(part, ImagePart)]
    render, rendered = VisionProcessor.render, []

    def noted(self: Any, part: Any, *content: Any) -> Any:
        rendered.append(part)
        return render(self, part, *content)

    monkeypatch.setattr(VisionProcessor, "render", noted)

    async def main() -> None:
        with engine.processor._vision._lock:  # until both have come as far as the checkpoint's processor
            large = asyncio.create_task(engine.count_tokens(request(*range(20, 32))))
            small = asyncio.create_task(engine.count_tokens(request(40)))
            while not engine.fronts[0].media.loader._renderer._queue._waiting:
                await asyncio.sleep(0.001)
        await asyncio.gather(small, large)

    asyncio.run(main())
    assert len(rendered) == 13 and rendered.index(alone[0]) < 12


def test_a_request_whose_client_has_left_is_not_prepared_further(engine):
    deadline = Deadline(60, "")

    async def main() -> None:
        with engine.processor._vision._lock:
            running = asyncio.create_task(engine.preparations._prepare(request(50, 51), deadline))
            while engine.fronts[0].media.loader._renderer._queue.has_room(1):
                await asyncio.sleep(0.001)
            deadline.cancel()
        with pytest.raises(Cancelled):
            await running

    asyncio.run(main())


def test_a_long_text_beside_a_picture_takes_the_place_of_a_long_prompt(engine, monkeypatch):
    run, are_long = engine.pool.run, []

    async def noted(*args: Any, is_long: bool = False, **options: Any) -> Any:
        are_long.append(is_long)
        return await run(*args, is_long=is_long, **options)

    monkeypatch.setattr(engine.pool, "run", noted)
    asyncio.run(engine.count_tokens(request(60)))
    assert not any(are_long)
    monkeypatch.setattr(preparing, "LONG_CHARS", 5)
    asyncio.run(engine.count_tokens(request(60)))
    assert are_long[-1]


def test_a_refused_request_leaves_nothing_of_its_images_in_memory(engine):
    """Also before any garbage collection: no cycle holds what the error came through."""

    broken = ImagePart("data:image/png;base64," + base64.b64encode(encode(corners())[:-30]).decode())

    async def refuse() -> list[weakref.ref[Any]]:
        [message] = request(*range(60, 64)).messages
        parts = (*message.parts, broken)
        with suppress(InvalidImage):
            await engine.submit(Request(request_id="r", messages=(Message("user", parts),)))
        return [weakref.ref(part) for part in message.parts if isinstance(part, ImagePart)]

    gc.disable()
    try:
        parts = asyncio.run(refuse())
        patience = iter(range(200))
        while any(part() for part in parts) and next(patience, None) is not None:
            time.sleep(0.01)  # threads are about to let go of their last piece of work
        assert not any(part() for part in parts)
    finally:
        gc.enable()


def test_a_picture_that_is_asked_for_many_times_at_once_is_one(engine):
    async def main() -> None:
        counts = await asyncio.gather(*(engine.count_tokens(request(7, 8)) for _ in range(12)))
        assert len(set(counts)) == 1

    asyncio.run(main())
