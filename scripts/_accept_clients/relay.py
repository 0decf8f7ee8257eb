"""Stands between a client and the server: hands everything on, notes it, and fails where it is told to."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_mlx.server.run import listen

from .faults import Cut, Fault, Refuse

_REPLY_PATHS = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
_ERRORS = (b"event: error\n", b"event: response.failed\n", b'data: {"error"')
_OWN_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding"})


class _Broken(Exception):
    """Ends a response in the middle, so that the connection is cut."""


@dataclass(slots=True)
class Seen:
    """One request of the client and what it was answered. Times are in seconds since the first one."""

    at_s: float
    method: str
    path: str
    body: Any = None
    status: int = 0
    retry_after: str | None = None
    fault: str | None = None
    end: str = "open"  # complete, cut, client gone
    num_errors: int = 0  # in the stream

    @property
    def is_main(self) -> bool:
        """A request of the agent itself: titles and counts have no tools."""
        return self.path in _REPLY_PATHS and isinstance(self.body, dict) and bool(self.body.get("tools"))

    @property
    def results(self) -> list[str]:
        """What came back from the tools that the client ran, as JSON."""
        if not isinstance(self.body, dict):
            return []
        items = self.body.get("messages") or self.body.get("input") or []
        found = []
        for item in items if isinstance(items, list) else []:
            blocks = item.get("content") if isinstance(item.get("content"), list) else []
            found += [block for block in blocks if block.get("type") == "tool_result"]
            if item.get("role") == "tool" or item.get("type") in ("function_call_output", "custom_tool_call_output"):
                found.append(item)
        return [json.dumps(each) for each in found]


@dataclass(slots=True)
class Relay:
    upstream: str
    fault: Fault | None = None
    seen: list[Seen] = field(default_factory=list)
    _started_s: float = 0.0
    _num_main: int = 0

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        now = time.monotonic()
        self._started_s = self._started_s or now
        seen = Seen(now - self._started_s, request.method, request.url.path, _json(body))
        self.seen.append(seen)
        failure = self._failure(seen)
        if isinstance(failure, Refuse):
            answer = failure.answer(seen.path)
            seen.status, seen.retry_after, seen.end = answer.status_code, answer.headers.get("retry-after"), "complete"
            return answer
        return await self._forward(request, body, seen, failure)

    def _failure(self, seen: Seen) -> Refuse | Cut | None:
        if self.fault is None or not seen.is_main:
            return None
        number, self._num_main = self._num_main, self._num_main + 1
        if not self.fault.first <= number < self.fault.first + self.fault.times:
            return None
        seen.fault = self.fault.name
        return self.fault.what

    async def _forward(self, request: Request, body: bytes, seen: Seen, cut: Cut | None) -> Response:
        client = httpx.AsyncClient(base_url=self.upstream, timeout=None, trust_env=False)
        headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
        path = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        try:
            answer = await client.send(client.build_request(request.method, path, headers=headers, content=body),
                                       stream=True)  # fmt: skip
        except httpx.HTTPError:
            await client.aclose()
            seen.status, seen.end = 502, "complete"
            return Response("The server is not there.", 502)
        seen.status, seen.retry_after = answer.status_code, answer.headers.get("retry-after")
        kept = {name: value for name, value in answer.headers.items() if name not in _OWN_HEADERS}
        return StreamingResponse(_watched(client, answer, seen, cut), answer.status_code, kept)


async def _watched(
    client: httpx.AsyncClient, answer: httpx.Response, seen: Seen, cut: Cut | None
) -> AsyncIterator[bytes]:
    num_events = 0
    seen.end = "client gone"
    try:
        async for chunk in answer.aiter_raw():
            seen.num_errors += sum(chunk.count(mark) for mark in _ERRORS)
            events = chunk.split(b"\n\n")
            for event, rest in zip(events, [*[b"\n\n"] * (len(events) - 1), b""], strict=True):
                yield event + rest
                num_events += bool(rest)
                if cut is not None and num_events >= cut.after_events:
                    seen.end = "cut"
                    if cut.is_abrupt:
                        raise _Broken
                    return
        seen.end = "complete"
    finally:
        await answer.aclose()
        await client.aclose()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


@contextlib.contextmanager
def relaying(relay: Relay) -> Iterator[str]:
    """The address that the client is given."""
    log = logging.getLogger("uvicorn.error")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it would tell of every cut at length
    sock = listen("127.0.0.1", 0)
    routes = [Route("/{path:path}", relay.handle, methods=["GET", "HEAD", "POST", "DELETE"])]
    config = uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        log.setLevel(level)
