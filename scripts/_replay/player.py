"""Plays a trace against a server as its clients would: their order, their overlap, their waiting for replies."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import httpx

from vllm_mlx.cli.remote import event_of

from .conversation import Bodies, Conversations
from .trace import Protocol, Recorded, ReplayError, Reply

MAX_GAP_S = 0.1  # between the starts of two requests that do not wait for one another
_SILENCE_S = 600.0
_OWN_HEADERS = ("content-length", "host", "authorization", "x-api-key", "connection", "accept-encoding")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Moments are of `time.perf_counter`."""

    recorded: Recorded
    bodies: Bodies
    status: int
    sent_s: float
    first_s: float | None  # when the first of the reply came
    ended_s: float
    reply: Reply | None  # None if the request was refused or asks for no reply
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s


class Player:
    def __init__(self, url: str, conversations: Conversations, *, api_key: str = "none"):
        self._url = url
        self._conversations = conversations
        self._keys = {"authorization": f"Bearer {api_key}", "x-api-key": api_key}

    async def play(self, trace: Sequence[Recorded], done: Callable[[Outcome], None]) -> None:
        """Play session after session. Call `done` when a reply has ended."""
        async with httpx.AsyncClient(timeout=httpx.Timeout(_SILENCE_S), trust_env=False) as client:
            for _, session in groupby(trace, key=lambda each: each.session):
                await self._play_session(client, list(session), done)

    async def _play_session(
        self, client: httpx.AsyncClient, session: Sequence[Recorded], done: Callable[[Outcome], None]
    ) -> None:
        started = [asyncio.Event() for _ in session]
        ended = [asyncio.Event() for _ in session]

        async def one(index: int) -> None:
            recorded = session[index]
            if index:
                await started[index - 1].wait()
                await asyncio.sleep(min(MAX_GAP_S, max(0.0, recorded.at_s - session[index - 1].at_s)))
            parents = self._conversations.parents(recorded)
            for earlier, event in zip(session[:index], ended, strict=False):
                if earlier.thread == recorded.thread or earlier.number in parents:
                    await event.wait()
            started[index].set()
            try:
                done(await self._send(client, recorded))
            finally:
                ended[index].set()

        async with asyncio.TaskGroup() as group:
            for index in range(len(session)):
                group.create_task(one(index))

    async def _send(self, client: httpx.AsyncClient, recorded: Recorded) -> Outcome:
        bodies = self._conversations.bodies(recorded)
        headers = {name: value for name, value in recorded.headers.items() if name.lower() not in _OWN_HEADERS}
        sent_s = time.perf_counter()
        async with client.stream(
            recorded.method,
            self._url + recorded.endpoint,
            headers={**headers, **self._keys},
            json=bodies.sent if recorded.body is not None else None,
        ) as response:
            protocol = recorded.protocol
            if protocol is None or response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                error = "" if response.is_success or protocol is None else text
                return Outcome(recorded, bodies, response.status_code, sent_s, None, time.perf_counter(), None, error)
            reply, first_s, error = await _read(protocol, response)
        if not error:
            self._conversations.answered(recorded, reply)
        return Outcome(recorded, bodies, 200, sent_s, first_s, time.perf_counter(), reply, error)


async def _read(protocol: Protocol, response: httpx.Response) -> tuple[Reply, float | None, str]:
    """Read the reply, the moment of its first part, and the error, which is empty for a complete reply."""
    reply, first_s = Reply(), None
    if "text/event-stream" not in response.headers.get("content-type", ""):
        raise ReplayError("The trace asks for a reply that is not streamed; this player reads streams only.")
    async for line in response.aiter_lines():
        if (event := event_of(line)) is None:
            continue
        if event.get("error"):
            return reply, first_s, json.dumps(event["error"])
        if protocol.feed(reply, event) and first_s is None:
            first_s = time.perf_counter()
    return reply, first_s or time.perf_counter(), "" if reply.prompt_tokens else "The stream ended without its usage."
