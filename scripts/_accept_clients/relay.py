"""A proxy between a client and the server, which notes each request and its answer."""

import contextlib
import json
import re
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

REPLY_PATHS = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
_IMAGE = re.compile(r'"data:image/|"media_type": "image/')
_ERRORS = (b"event: error\n", b"event: response.failed\n", b'data: {"error"')
_OWN_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding"})


@dataclass(slots=True)
class Seen:
    """One request of the client and its answer. Times are in seconds since the first request."""

    at_s: float
    method: str
    path: str
    body: Any = None
    status: int = 0
    end: str = "open"  # complete, client gone
    num_errors: int = 0  # in the stream

    @property
    def is_main(self) -> bool:
        """Return whether the agent itself asks: requests for titles and counts have no tools."""
        return self.path in REPLY_PATHS and isinstance(self.body, dict) and bool(self.body.get("tools"))

    @property
    def has_image(self) -> bool:
        """Return whether the body holds an image, in the words of any protocol."""
        return self.path in REPLY_PATHS and _IMAGE.search(json.dumps(self.body)) is not None

    @property
    def results(self) -> list[str]:
        """Return the results of the tools that the client ran, as JSON."""
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
    seen: list[Seen] = field(default_factory=list)
    _started_s: float = 0.0

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        now = time.monotonic()
        self._started_s = self._started_s or now
        seen = Seen(now - self._started_s, request.method, request.url.path, _json(body))
        self.seen.append(seen)
        client = httpx.AsyncClient(base_url=self.upstream, timeout=None, trust_env=False)
        headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
        path = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        sent = client.build_request(request.method, path, headers=headers, content=body)
        try:
            answer = await client.send(sent, stream=True)
        except httpx.HTTPError:
            await client.aclose()
            seen.status, seen.end = 502, "complete"
            return Response("The server is not there.", 502)
        seen.status = answer.status_code
        kept = {name: value for name, value in answer.headers.items() if name not in _OWN_HEADERS}
        return StreamingResponse(_watched(client, answer, seen), answer.status_code, kept)


async def _watched(client: httpx.AsyncClient, answer: httpx.Response, seen: Seen) -> AsyncIterator[bytes]:
    seen.end = "client gone"
    try:
        async for chunk in answer.aiter_raw():
            seen.num_errors += sum(chunk.count(mark) for mark in _ERRORS)
            yield chunk
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
    """Run the relay during the block, and yield its address."""
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
