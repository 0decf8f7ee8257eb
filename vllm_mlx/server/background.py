"""Responses that are made while nobody waits: asked for now, read later, cancelled in between."""

import asyncio
import logging
from collections.abc import Callable

from ..api.encoder import ReplyFold
from ..core.errors import GenerationError, VLLMMLXError
from .log import RequestRecord
from .ports import Generation
from .streaming import raise_if_failed

logger = logging.getLogger(__name__)


class BackgroundReplies:
    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self,
        reply_id: str,
        generation: Generation,
        fold: ReplyFold,
        record: RequestRecord,
        *,
        done: Callable[[], None],
        failed: Callable[[VLLMMLXError], None],
    ) -> None:
        """Exactly one of `done` and `failed` is called, unless the reply is cancelled."""

        async def work() -> None:
            try:
                async with generation:
                    async for index, event in generation:
                        raise_if_failed(event)
                        record.observe(index, event)
                        fold.feed(index, event)
                done()
            except VLLMMLXError as error:
                failed(error)
            except Exception:
                logger.exception("Reply %s failed by an error of the server", reply_id)
                failed(GenerationError("The server failed on this request."))
            finally:
                self._tasks.pop(reply_id, None)

        self._tasks[reply_id] = asyncio.create_task(work())

    async def cancel(self, reply_id: str) -> bool:
        """Whether it was still being made. It is not any more when this returns."""
        task = self._tasks.pop(reply_id, None)
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True
