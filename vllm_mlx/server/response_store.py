"""Responses that outlive their HTTP request: stored for later turns, or made in the background."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ..api.responses.encode import ResponseStream
from ..api.responses.replies import ResponseError
from ..api.responses.stored import StoredResponse
from ..core.errors import InvalidParameter
from ..disk.kept import Journal, Kept
from ..util.lru import LRU
from .log import RequestRecord, error_of
from .routes import Submission, feed_all, for_client

MAX_RESPONSES = 1000
MAX_BYTES = 256 * 1024 * 1024
_RUNNING = ("queued", "in_progress")
_LOST = ResponseError(code="server_error", message="The server was started again before this response had ended.")


class ResponseStore:
    """Responses in memory for the requests that continue them. It is bounded and evicts the least recently used."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        journal: Journal | None = None,
        tenant: str = "",
    ) -> None:
        """Make an empty store. `journal` keeps its responses, as those of `tenant`, for the next start."""
        self._journal = journal
        self._tenant = tenant
        self._responses: LRU[str, StoredResponse] = LRU(max_bytes, max_responses)
        self._items: dict[str, Mapping[str, Any]] = {}  # items of replies, by id

    def check_room(self, response: StoredResponse) -> None:
        """Check a response that has not begun, so that none is made that cannot be stored. Raises InvalidParameter."""
        if response.num_bytes > self._responses.max_bytes:
            most = f"{self._responses.max_bytes} bytes of memory, which this API key has for stored responses"
            raise InvalidParameter(
                f"`input` is too large to be stored: with the request fields that a reply repeats, it takes "
                f"{response.num_bytes} of {most}. Send less, or set `store` to false.",
                param="input",
            )

    def put(self, response: StoredResponse) -> None:
        """Store a response, which replaces its earlier state, and evict others if there is no room.

        The reply of a response that had room counts only as far as there is room.
        """
        self._put(response)
        if self._journal is not None:
            self._journal.put(
                response.response_id,
                self._tenant,
                response.to_value,
                num_bytes=response.num_bytes,
                base=response.previous_id,
            )

    def restore(self, responses: Sequence[StoredResponse]) -> None:
        """Store the responses of the last start. A response that had not ended has failed with its process."""
        continued = {response.previous_id for response in responses}
        for response in responses:
            if response.reply.status in _RUNNING:
                response.reply.status, response.reply.error = "failed", _LOST
            self._put(response)
            if response.response_id not in continued:
                self._chain(response.response_id)

    def _put(self, response: StoredResponse) -> None:
        if (earlier := self._responses.pop(response.response_id)) is not None:
            self._forget_items(earlier)
        num_bytes = min(response.num_bytes, self._responses.max_bytes)
        for evicted_id, evicted in self._responses.put(response.response_id, response, num_bytes):
            self._forget(evicted_id, evicted)
        self._items.update((item["id"], item) for item in response.output)

    def changed(self, response_id: str) -> None:
        """Keep the present state of a response whose reply was changed."""
        if (response := self.get(response_id)) is not None:
            self.put(response)

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def remove(self, response_id: str) -> bool:
        if (removed := self._responses.pop(response_id)) is not None:
            self._forget(response_id, removed)
        return removed is not None

    def _forget(self, response_id: str, response: StoredResponse) -> None:
        self._forget_items(response)
        if self._journal is not None:
            self._journal.drop([response_id])

    def _forget_items(self, response: StoredResponse) -> None:
        for item in response.output:
            self._items.pop(item["id"], None)

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        return self._items.get(item_id)

    def conversation(self, response_id: str) -> Sequence[Mapping[str, Any]] | None:
        """Return all items up to the end of this response, or None if a part of them is no longer stored."""
        chain = self._chain(response_id)
        return None if chain is None else [item for each in chain for item in (*each.input, *each.output)]

    def input_of(self, response_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the input of this response, after the earlier conversation if that is still stored."""
        response = self.get(response_id)
        assert response is not None, "the caller has found it"
        earlier = self.conversation(response.previous_id) if response.previous_id else None
        return [*(earlier or ()), *response.input]

    def _chain(self, response_id: str) -> list[StoredResponse] | None:
        """Return the responses up to this one, which all count as used now, or None if one is missing."""
        chain: list[StoredResponse] = []
        current: str | None = response_id
        while current is not None:
            response = self._responses.get(current)
            if response is None:
                return None
            chain.append(response)
            current = response.previous_id
        for response in reversed(chain):
            self.get(response.response_id)  # an earlier response counts as used before those that continue it
        return chain[::-1]


class ResponseStores:
    """One store per tenant, or one for all if no API key is needed. They divide the limits evenly.

    A journal is restored on another thread; a request that needs a store before that waits, but not without end.
    """

    def __init__(self, num_keys: int, journal: Journal | None = None) -> None:
        self._share = max(1, num_keys)
        self._journal = journal
        self._restored: dict[str, list[StoredResponse]] = {}  # by tenant, until the tenant asks for them
        self._stores: dict[str, ResponseStore] = {}
        if journal is not None:
            journal.restore(self._restore)

    async def of(self, tenant: str) -> ResponseStore:
        if tenant not in self._stores and self._journal is not None:
            await asyncio.to_thread(self._journal.wait)
        if tenant not in self._stores:
            limits = {"max_responses": max(1, MAX_RESPONSES // self._share), "max_bytes": MAX_BYTES // self._share}
            self._stores[tenant] = ResponseStore(**limits, journal=self._journal, tenant=tenant)
        if tenant in self._restored:
            self._stores[tenant].restore(self._restored.pop(tenant))
        return self._stores[tenant]

    def _restore(self, kept: list[Kept]) -> None:
        restored: dict[str, list[StoredResponse]] = defaultdict(list)
        for value in kept:
            try:
                restored[value.salt].append(StoredResponse.of_value(value.value()))
            except (ValueError, KeyError, TypeError):
                continue
        self._restored = restored


class BackgroundReplies:
    """Replies that are generated in the background. Each has its own task, which owns its generation."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, reply_id: str, submission: Submission, fold: ResponseStream, record: RequestRecord) -> None:
        """Return once the engine has accepted the request. Raises the errors of the submission.

        Afterwards the fold is finished or has failed, unless the reply is cancelled. Cancelling `start` cancels it.
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
                fold.fail(for_client(error, record))

        async def work() -> None:
            try:
                settle(await error_of(generate()))
            finally:
                accepted.cancel()  # without effect unless the task was cancelled before it was accepted
                self._tasks.pop(reply_id, None)

        self._tasks[reply_id] = asyncio.create_task(work())
        async with AsyncExitStack() as undone:
            undone.push_async_callback(self.cancel, reply_id)
            await accepted
            undone.pop_all()

    async def cancel(self, reply_id: str) -> bool:
        """Cancel the reply and wait for its end. Returns whether it was still being made."""
        if (task := self._tasks.pop(reply_id, None)) is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True
