"""One request on the event loop: its preparation, its replies, and what the next turn needs of them.

Updates of sequences come in, and generation events go out.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from types import TracebackType

from ..core.errors import Cancelled, VLLMMLXError, setting
from ..core.events import Counted, Failed, Finished, FinishReason, GenerationEvent, PromptProgress, Started, Usage
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate
from ..formats.pipeline import OutputPipeline
from ..formats.reply import FinishedReply
from ..prompt.processor import PreparedRequest, RequestProcessor
from ..util.fence import Fence, clear_locals
from ..util.tasks import Deadline
from .media_requests import MediaRequests
from .monitoring.counters import Outcome, ReplyStats
from .preparing import PromptPool, is_long

logger = logging.getLogger(__name__)

_OUTCOMES: dict[FinishReason, Outcome] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.ABORT: "aborted",
}
IndexedEvent = tuple[int, GenerationEvent]


class Preparations:
    """All requests that are being prepared. Belongs to one event loop."""

    def __init__(self, processor: RequestProcessor, media: MediaRequests, pool: PromptPool, *, max_prepare_s: float):
        self._processor = processor
        self._media = media
        self._pool = pool
        self._max_prepare_s = max_prepare_s
        self._open: list[_Preparation] = []

    @property
    def replies(self) -> list[ReplyStats]:
        """Return the progress of the replies whose prompts are being prepared."""
        return [reply for preparation in self._open for reply in preparation.replies]

    async def prepare(self, request: Request, *, runs: bool = True) -> tuple[PreparedRequest, list[ReplyStats]]:
        """Prepare a prompt. If the caller leaves, the work ends at its next check of the deadline.

        With `runs` False, it is only counted. Also returns the progress of each reply to the request. Raises
        RequestError, and Cancelled after `cancel`.
        """
        deadline = Deadline(
            self._max_prepare_s,
            f"This request took more than {self._max_prepare_s:g} seconds to prepare ({setting('max_prepare_s')}). "
            "Send a shorter one, or try again when the server is less busy.",
        )
        preparation = _Preparation(request, _replies(request), asyncio.current_task())
        self._open.append(preparation)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await self._prepare(request, deadline, runs), preparation.replies
        except TimeoutError:
            deadline.check()
            raise
        except asyncio.CancelledError:
            if preparation.is_cancelled and preparation.task is not None and not preparation.task.uncancel():
                raise Cancelled() from None
            raise
        finally:
            self._open.remove(preparation)
            deadline.cancel()

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End the preparation of a request with Cancelled.

        Returns False if no request that is prepared has this id and a salt that begins with `salts`.
        """
        found = [preparation for preparation in self._open if preparation.matches(request_id, salts)]
        for preparation in found:
            preparation.cancel()
        return bool(found)

    @property
    def pixels_bytes(self) -> int:
        """Return the bytes of decoded images that are kept."""
        return self._media.pixels_bytes

    async def close(self) -> None:
        await self._media.close()

    async def _prepare(self, request: Request, deadline: Deadline, runs: bool = True) -> PreparedRequest:
        """Prepare on a prompt thread, with the media first. Media that the model does not take is never fetched."""
        rendered = None
        try:
            self._processor.media_of(request)  # before a document is read
            request = await self._media.read_documents(request, deadline=deadline)
            if parts := self._processor.media_of(request):
                rendered = await self._media.render(
                    parts, salt=request.cache_salt, tenant=request.tenant, deadline=deadline
                )
            work = partial(self._processor.prepare, request, rendered, deadline=deadline, runs=runs)
            return await self._pool.run(work, tenant=request.tenant, deadline=deadline, is_long=is_long(request))
        except BaseException as error:
            clear_locals(error)  # so that a handler that keeps the error keeps no pixels, arrays or texts
            raise


@dataclass(eq=False, slots=True)
class _Preparation:
    """One request that a task prepares."""

    request: Request
    replies: list[ReplyStats]
    task: "asyncio.Task[object] | None"
    is_cancelled: bool = False

    def matches(self, request_id: str, salts: str) -> bool:
        ids = [self.request.request_id, *(reply.request_id for reply in self.replies)]
        return self.request.cache_salt.startswith(salts) and request_id in ids

    def cancel(self) -> None:
        if self.task is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


def _replies(request: Request) -> list[ReplyStats]:
    """Return the progress of the replies to a request that has just arrived."""
    now, num_replies = monotonic(), request.sampling.n
    return [
        ReplyStats(
            request_id=request.request_id if num_replies == 1 else f"{request.request_id}-{index}",
            tenant=request.tenant,
            model=request.model,
            client=request.client,
            path=request.path,
            max_tokens=request.sampling.max_tokens or 0,
            arrived_s=now if request.arrived_s is None else request.arrived_s,
            queued_s=now,
        )
        for index in range(num_replies)
    ]


class Reply:
    """One of the n replies to a request."""

    def __init__(self, index: int, seq: Sequence, output: OutputPipeline, stats: ReplyStats):
        self.index = index
        self.seq = seq
        self.stats = stats
        self._output = output
        self._num_cached_tokens: int | None = None  # None until the sequence has been scheduled
        self._predicted = (0, 0)  # tokens of the prediction that were accepted, and rejected
        self.is_open = True

    def take(self, update: SequenceUpdate) -> list[GenerationEvent]:
        """Turn an update into events. A reply that a stop string or its last tool call ends is closed here."""
        if update.error is not None:
            return self.fail(update.error)
        events: list[GenerationEvent] = []
        self._predicted = (update.num_predicted, update.num_mispredicted)
        num_prompt_tokens = self.seq.num_prompt_tokens
        if self._num_cached_tokens is None:
            self._num_cached_tokens = update.receipt.cached_tokens
            events.append(Started(num_prompt_tokens, self._num_cached_tokens, self.stats.receipt))
        if update.tokens:
            deltas = self._output.feed(update.tokens)
            counted = [Counted(self._used(self._output.usage(self._num_cached_tokens)))] if self._output.counts else []
            events += [*counted, *deltas]
        elif self._num_cached_tokens < update.num_computed_tokens < num_prompt_tokens:
            events.append(PromptProgress(update.num_computed_tokens, num_prompt_tokens))
        if self._output.stopped:
            return events + self._finish(FinishReason.STOP, None)
        if update.finish_reason is not None:
            return events + self._finish(update.finish_reason, update.stop_token_id)
        return events

    async def take_scores(self, update: SequenceUpdate) -> None:
        """Take the log-probabilities of the prompt, on a thread, since those of a long prompt take long."""
        await asyncio.to_thread(self._output.feed_prompt, update.prompt_logprobs)

    @property
    def finished(self) -> FinishedReply:
        """The reply so far, or the complete reply once it has ended."""
        return self._output.reply

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> list[GenerationEvent]:
        events = self._output.finish(reason, stop_token_id, cached_tokens=self._num_cached_tokens or 0)
        *deltas, finished = events
        assert isinstance(finished, Finished), "a reply ends with it"
        if self._output.is_silent:
            num_tokens, limit = finished.usage.completion_tokens, setting("max_silent_tokens")
            logger.info("id=%s ends after %d tokens without an answer (%s)", self.stats.request_id, num_tokens, limit)
        self._close(_OUTCOMES[finished.reason])
        return [*deltas, replace(finished, usage=self._used(finished.usage))]

    def _used(self, usage: Usage) -> Usage:
        """Add the receipt, and the tokens of the prediction."""
        usage = replace(usage, receipt=self.stats.receipt)
        if usage.accepted_prediction_tokens is not None:
            accepted, rejected = self._predicted
            accepted = min(accepted, usage.completion_tokens)  # a stop string may cut some of them off
            usage = replace(usage, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
        return usage

    def fail(self, error: VLLMMLXError) -> list[GenerationEvent]:
        self._close("cancelled" if isinstance(error, Cancelled) else "failed")
        return [Failed(error)]

    def leave(self) -> None:
        """End the reply because its client has left. What the client received stays."""
        self._close("aborted")

    def _close(self, outcome: Outcome) -> None:
        self.is_open = False
        self.stats.end(outcome, monotonic())


class Generation:
    """All replies to one request. Leaving the `async with` block aborts the ones that still run."""

    def __init__(
        self,
        prepared: PreparedRequest,
        replies: Mapping[int, Reply],
        keeper: "ReplyKeeper",
        *,
        abort: Callable[[Items[int]], None],
        closed: Callable[["Generation"], None],
    ):
        """Hold `replies`, by sequence id. `abort` ends sequences; leaving the block calls `closed`."""
        self.request = prepared.request
        self._prepared = prepared
        self._keeper = keeper
        self.num_prompt_tokens = len(prepared.prompt.token_ids)
        self.prompt_change = None if prepared.compared is None else prepared.compared.change
        self.seq_ids = tuple(replies)
        self.by_sequence = replies
        self._abort = abort
        self._closed = closed
        self._updates: list[SequenceUpdate | VLLMMLXError] = []
        self._wake = asyncio.Event()

    @property
    def replies(self) -> list[ReplyStats]:
        """Return the progress of the replies that have not ended."""
        return [reply.stats for reply in self.by_sequence.values() if reply.is_open]

    @property
    def all_replies(self) -> list[ReplyStats]:
        return [reply.stats for reply in self.by_sequence.values()]

    def stats(self, seq_id: int) -> ReplyStats:
        return self.by_sequence[seq_id].stats

    def cancel(self, request_id: str) -> bool:
        """End all replies, or the one with this id, with Cancelled. Returns False if none of them runs."""
        names = {
            seq_id: (self.request.request_id, reply.stats.request_id) for seq_id, reply in self.by_sequence.items()
        }
        ending = [seq_id for seq_id in names if self.by_sequence[seq_id].is_open and request_id in names[seq_id]]
        self._abort(ending)
        for seq_id in ending:
            self.put(SequenceUpdate(seq_id=seq_id, error=Cancelled()))
        return bool(ending)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reply in self._end_open_replies():
            reply.leave()
            self._keeper.take(self._prepared, reply)
        self._closed(self)

    async def __aiter__(self) -> AsyncIterator[IndexedEvent]:
        """Yield (index of the reply, event) until every reply has sent Finished or Failed.

        Updates that arrive while the consumer is busy are joined, so a slow reader gets fewer, longer deltas.
        """
        while any(reply.is_open for reply in self.by_sequence.values()):
            await self._wake.wait()
            self._wake.clear()
            updates, self._updates = self._updates, []
            for item in updates if len(updates) == 1 else _join(updates):
                if isinstance(item, SequenceUpdate) and item.prompt_logprobs:
                    await self.by_sequence[item.seq_id].take_scores(item)
                for event in self._events(item):
                    yield event

    def put(self, item: SequenceUpdate | VLLMMLXError) -> None:
        """Add an update of one sequence, or an error that ends all of them. Called on the event loop."""
        self._updates.append(item)
        self._wake.set()

    def _end_open_replies(self) -> list[Reply]:
        """Abort the sequences of the replies that still run, and return these replies."""
        left = [reply for reply in self.by_sequence.values() if reply.is_open]
        self._abort([reply.seq.seq_id for reply in left])
        return left

    def _events(self, item: SequenceUpdate | VLLMMLXError) -> list[IndexedEvent]:
        if isinstance(item, VLLMMLXError):
            return [event for reply in self._end_open_replies() for event in self._taken(reply, reply.fail(item))]
        reply = self.by_sequence[item.seq_id]
        if not reply.is_open:
            return []
        events = self._taken(reply, reply.take(item))
        if events and isinstance(events[-1][1], Finished) and item.finish_reason is None:
            self._abort([item.seq_id])  # its text ended it, which the engine cannot know
        return events

    def _taken(self, reply: Reply, events: list[GenerationEvent]) -> list[IndexedEvent]:
        """Return the events with the index of their reply. A reply that has ended is kept before they are sent."""
        if not reply.is_open:
            self._keeper.take(self._prepared, reply)
        return [(reply.index, event) for event in events]


def _join(updates: list[SequenceUpdate | VLLMMLXError]) -> list[SequenceUpdate | VLLMMLXError]:
    """Join the updates of each sequence, in the order of their first updates; errors come last."""
    gathered: dict[int, list[SequenceUpdate]] = {}
    errors: list[VLLMMLXError] = []
    for item in updates:
        if isinstance(item, VLLMMLXError):
            errors.append(item)
        else:
            gathered.setdefault(item.seq_id, []).append(item)
    return [*map(SequenceUpdate.joined, gathered.values()), *errors]


class ReplyKeeper:
    """Keeps the part of each reply with which the next turn can begin. Belongs to one event loop."""

    def __init__(self, processor: RequestProcessor, pool: PromptPool, keep: Callable[[Sequence, int], None] | None):
        """`keep` tells the engine how many tokens of a sequence stay in the prefix cache; None if the cache is off."""
        self._processor = processor
        self._pool = pool
        self._keep = keep
        self._trims: set[Future[None]] = set()
        self._is_closed = False

    def take(self, prepared: PreparedRequest, reply: Reply) -> None:
        """Remember the reply at once, because the next turn may follow at once; trim the cache later.

        An aborted reply counts as far as it was received: clients send that part back.
        """
        if self._is_closed:
            return
        finished = reply.finished
        with Fence("the reply, which the next turn will not recognise"):
            self._processor.remember(prepared, finished)
        if self._keep is None:
            return
        if not finished.token_ids:
            self._keep(reply.seq, reply.seq.num_prompt_tokens)
            return
        trim = self._pool.submit(self._trim, self._keep, prepared, reply.seq, finished, tenant=prepared.request.tenant)
        self._trims.add(trim)
        trim.add_done_callback(self._trims.discard)

    def _trim(
        self, keep: Callable[[Sequence, int], None], prepared: PreparedRequest, seq: Sequence, finished: FinishedReply
    ) -> None:
        """Keep only the part of the reply's state that the next turn can contain. Runs on a prompt thread."""
        keep(seq, max(self._processor.kept_tokens(prepared, finished), seq.num_prompt_tokens))

    def close(self) -> None:
        """Keep nothing of the replies that end from now on, because the shutdown cuts them."""
        self._is_closed = True

    async def finish(self, timeout_s: float) -> None:
        """Wait until the state of the replies that have ended is trimmed."""
        await asyncio.to_thread(wait, set(self._trims), timeout_s)
