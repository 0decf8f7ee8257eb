"""Responses that are made while nobody waits: asked for now, read later, cancelled in between."""

import asyncio
import logging
from collections.abc import Callable

from ..api.encoder import ReplyFold
from ..core.errors import GenerationError, VLLMMLXError
from .log import RequestRecord
from .replying import Submission
from .streaming import feed_all

logger = logging.getLogger(__name__)


class BackgroundReplies:
    """Each submission is entered and left by a task of its own, which owns its generation."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(
        self,
        reply_id: str,
        submission: Submission,
        fold: ReplyFold,
        record: RequestRecord,
        *,
        failed: Callable[[VLLMMLXError], None],
    ) -> None:
        """Return once the engine has accepted the request. Raises what the submission raises.

        Afterwards either the fold is finished or `failed` is called, unless the reply is cancelled. Cancelling
        `start` cancels the reply.
        """
        accepted = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                async with submission as generation:
                    if not accepted.done():  # else `start` was cancelled, which cancels this task next
                        accepted.set_result(None)
                    await feed_all(generation, fold, record)
                fold.finish()
            except Exception as error:
                if not accepted.done():
                    accepted.set_exception(error)
                else:
                    _report(reply_id, error, failed)
            finally:
                accepted.cancel()  # without effect unless the task was cancelled before it was accepted
                self._tasks.pop(reply_id, None)

        self._tasks[reply_id] = asyncio.create_task(work())
        try:
            await accepted
        except BaseException:
            await self.cancel(reply_id)
            raise

    async def cancel(self, reply_id: str) -> bool:
        """Whether it was still being made. It is not any more when this returns."""
        task = self._tasks.pop(reply_id, None)
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True


def _report(reply_id: str, error: Exception, failed: Callable[[VLLMMLXError], None]) -> None:
    if isinstance(error, VLLMMLXError):
        failed(error)
        return
    logger.error("Reply %s failed by an error of the server", reply_id, exc_info=error)
    failed(GenerationError("The server failed on this request."))
