"""The replies to one request, on the event loop: updates of sequences in, generation events out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from time import monotonic
from types import TracebackType

from ..core.errors import Cancelled, VLLMMLXError, setting
from ..core.events import Failed, Finished, FinishReason, GenerationEvent, PromptProgress, Started
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate
from ..formats.pipeline import OutputPipeline
from ..formats.reply import FinishedReply
from ..prompt.processor import PreparedRequest
from .monitoring.counters import Outcome, ReplyStats

logger = logging.getLogger(__name__)

_OUTCOMES: dict[FinishReason, Outcome] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.ABORT: "aborted",
}
IndexedEvent = tuple[int, GenerationEvent]
Ended = Callable[["Reply"], None]


class Reply:
    """One of the n replies to a request."""

    def __init__(self, index: int, seq: Sequence, output: OutputPipeline, stats: ReplyStats, ended: Ended):
        """`ended` is called once: when the reply is complete, before its last event is sent, or abandoned."""
        self.index = index
        self.seq = seq
        self.stats = stats
        self._output = output
        self._ended = ended
        self._num_cached_tokens: int | None = None  # None until the sequence has been scheduled
        self.is_open = True

    def take(self, update: SequenceUpdate) -> list[GenerationEvent]:
        """Turn an update into events. A reply that a stop string or its last tool call ends is closed here."""
        if not self.is_open:
            return []
        if update.error is not None:
            return self.fail(update.error)
        events: list[GenerationEvent] = []
        num_prompt_tokens = self.seq.num_prompt_tokens
        if self._num_cached_tokens is None:
            self._num_cached_tokens = update.num_cached_tokens
            events.append(Started(num_prompt_tokens, update.num_cached_tokens, self.stats.receipt))
        if update.tokens:
            events += self._output.feed(update.tokens)
        elif self._num_cached_tokens < update.num_computed_tokens < num_prompt_tokens:
            events.append(PromptProgress(update.num_computed_tokens, num_prompt_tokens))
        if self._output.stopped:
            return events + self._finish(FinishReason.STOP, None)
        if update.finish_reason is not None:
            return events + self._finish(update.finish_reason, update.stop_token_id)
        return events

    @property
    def finished(self) -> FinishedReply:
        """What the reply has produced so far, or completely once it has ended."""
        return self._output.reply

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> list[GenerationEvent]:
        events = self._output.finish(reason, stop_token_id, cached_tokens=self._num_cached_tokens or 0)
        *deltas, finished = events
        assert isinstance(finished, Finished), "a reply ends with it"
        if self._output.is_silent:
            num_tokens, limit = finished.usage.completion_tokens, setting("max_silent_tokens")
            logger.info("id=%s ends after %d tokens without an answer (%s)", self.stats.request_id, num_tokens, limit)
        self._close(_OUTCOMES[finished.reason])
        finished = replace(finished, usage=replace(finished.usage, receipt=self.stats.receipt))
        return [*deltas, finished]

    def fail(self, error: VLLMMLXError) -> list[GenerationEvent]:
        self._close("cancelled" if isinstance(error, Cancelled) else "failed")
        return [Failed(error)]

    def leave(self) -> None:
        """End the reply because its client has left. What the client received stays."""
        self._close("aborted")

    def _close(self, outcome: Outcome) -> None:
        self.is_open = False
        self.stats.end(outcome, monotonic())
        self._ended(self)


class Generation:
    """All replies to one request. Leaving the `async with` block aborts the ones that still run."""

    def __init__(
        self,
        prepared: PreparedRequest,
        replies: Mapping[int, Reply],
        *,
        abort: Callable[[Items[int]], None],
        closed: Callable[["Generation"], None],
    ):
        """`replies` are given by sequence id. `abort` ends sequences, and `closed` is called on leaving the block."""
        self.request = prepared.request
        self.num_prompt_tokens = len(prepared.prompt.token_ids)
        self.prompt_change = None if prepared.compared is None else prepared.compared.change
        self.seq_ids = tuple(replies)
        self._replies = replies
        self._abort = abort
        self._closed = closed
        self._updates: list[SequenceUpdate | VLLMMLXError] = []
        self._wake = asyncio.Event()

    @property
    def replies(self) -> list[ReplyStats]:
        """The progress of the replies that have not ended."""
        return [reply.stats for reply in self._replies.values() if reply.is_open]

    @property
    def all_replies(self) -> list[ReplyStats]:
        return [reply.stats for reply in self._replies.values()]

    def stats(self, seq_id: int) -> ReplyStats:
        return self._replies[seq_id].stats

    def cancel(self, request_id: str) -> bool:
        """End all replies, or the one with this id, with Cancelled. Returns False if none of them runs."""
        names = {seq_id: (self.request.request_id, reply.stats.request_id) for seq_id, reply in self._replies.items()}
        ending = [seq_id for seq_id in names if self._replies[seq_id].is_open and request_id in names[seq_id]]
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
        self._closed(self)

    async def __aiter__(self) -> AsyncIterator[IndexedEvent]:
        """Yield (index of the reply, event) until every reply has sent Finished or Failed.

        Updates that arrive while the consumer is busy are joined, so a slow reader gets fewer, longer deltas.
        """
        while any(reply.is_open for reply in self._replies.values()):
            await self._wake.wait()
            self._wake.clear()
            updates, self._updates = self._updates, []
            for item in updates if len(updates) == 1 else _join(updates):
                for event in self._events(item):
                    yield event

    def put(self, item: SequenceUpdate | VLLMMLXError) -> None:
        """Add an update of one sequence, or an error that ends all of them. Called on the event loop."""
        self._updates.append(item)
        self._wake.set()

    def _end_open_replies(self) -> list[Reply]:
        """Abort the sequences of the replies that still run, and return these replies."""
        left = [reply for reply in self._replies.values() if reply.is_open]
        self._abort([reply.seq.seq_id for reply in left])
        return left

    def _events(self, item: SequenceUpdate | VLLMMLXError) -> list[IndexedEvent]:
        if isinstance(item, VLLMMLXError):
            return [(reply.index, event) for reply in self._end_open_replies() for event in reply.fail(item)]
        reply = self._replies[item.seq_id]
        events = reply.take(item)
        if events and isinstance(events[-1], Finished) and item.finish_reason is None:
            self._abort([item.seq_id])  # its text ended it, which the engine cannot know
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
