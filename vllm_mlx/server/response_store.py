"""Responses that outlive their HTTP request: stored for later turns, or made in the background."""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.replies import ReplyFold
from ..api.responses.stored import StoredResponse
from ..core.errors import VLLMMLXError
from .log import RequestRecord, error_of
from .streaming import Submission, feed_all, for_client

MAX_RESPONSES = 1000
MAX_BYTES = 256 * 1024 * 1024


class ResponseStore:
    """Responses in memory for the requests that continue them: bounded, the longest unused are evicted first."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # oldest use first
        self._items: dict[str, Mapping[str, Any]] = {}  # items of replies, by id
        self._num_bytes = 0

    def put(self, response: StoredResponse) -> None:
        """Store a response in place of its earlier state, and evict others if there is no room."""
        self.remove(response.response_id)
        self._responses[response.response_id] = response
        self._items.update((item["id"], item) for item in response.output)
        self._num_bytes += response.num_bytes
        while self._responses and (len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes):
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def remove(self, response_id: str) -> bool:
        removed = self._responses.pop(response_id, None)
        if removed is None:
            return False
        self._num_bytes -= removed.num_bytes
        for item in removed.output:
            self._items.pop(item["id"], None)
        return True

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        return self._items.get(item_id)

    def conversation(self, response_id: str) -> Sequence[Mapping[str, Any]] | None:
        """All items up to the end of this response, or None if a part of them is no longer stored."""
        chain = self._chain(response_id)
        if chain is None:
            return None
        return [item for response in chain for item in (*response.input, *response.output)]

    def input_of(self, response_id: str) -> Sequence[Mapping[str, Any]]:
        """The input of this response, after the earlier conversation if that is still stored."""
        response = self._responses[response_id]
        earlier = self.conversation(response.previous_id) if response.previous_id else None
        return [*(earlier or ()), *response.input]

    def _chain(self, response_id: str) -> list[StoredResponse] | None:
        """The responses from the first to this one, all of which now count as used; None if one is missing."""
        chain: list[StoredResponse] = []
        current: str | None = response_id
        while current is not None:
            response = self._responses.get(current)
            if response is None:
                return None
            chain.append(response)
            current = response.previous_id
        chain.reverse()
        for response in chain:
            self._responses.move_to_end(response.response_id)
        return chain


def tenant_stores(num_keys: int) -> defaultdict[str, ResponseStore]:
    """One store per tenant, or one for all if no API key is needed. They divide the limits evenly."""
    share = max(1, num_keys)
    return defaultdict(
        lambda: ResponseStore(max_responses=max(1, MAX_RESPONSES // share), max_bytes=MAX_BYTES // share)
    )


class BackgroundReplies:
    """Replies that are generated in the background. Each has its own task, which owns its generation."""

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

        async def generate() -> None:
            async with submission as generation:
                if not accepted.done():  # else `start` was cancelled, which cancels this task next
                    accepted.set_result(None)
                await feed_all(generation, fold, record)
            fold.finish()

        def settle(error: Exception | None) -> None:
            if error is not None and not accepted.done():
                accepted.set_exception(error)
            elif error is not None:
                failed(for_client(error, record))

        async def work() -> None:
            try:
                settle(await error_of(generate()))
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
        """Cancel the reply and wait for its end. Returns whether it was still being made."""
        task = self._tasks.pop(reply_id, None)
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True
