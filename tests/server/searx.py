"""A search server of tests: a SearXNG by its JSON, and an MCP server beside it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGES = [
    {"url": "https://en.example.org/a", "title": "A", "content": "about  a"},
    {"url": "http://127.0.0.1/admin", "title": "inside"},
    {"url": "https://news.example.com/b", "title": "B", "content": "about b"},
]


@dataclass
class Searx:
    """A SearXNG that answers by JSON, and an MCP server at `/mcp`, by JSON or events."""

    url: str = ""
    queries: list[str] = field(default_factory=list)
    answer: Callable[[str], tuple[int, bytes]] = lambda query: (200, json.dumps({"results": PAGES}).encode())
    mcp: Any = field(default_factory=lambda: {"structuredContent": {"results": PAGES}})
    events: bool = False
    sessions: list[str | None] = field(default_factory=list)
    num_ended: int = 0  # sessions
    is_hasty: bool = False  # closes the connection in place of an answer to the end of a session

    def rpc(self, call: Any) -> Any:
        match call["method"]:
            case "initialize":
                return {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
            case "tools/list":
                other = {"name": "fetch", "inputSchema": {"properties": {"url": {}}}}
                return {"tools": [other, {"name": "web-search", "inputSchema": {"properties": {"query": {}}}}]}
            case "tools/call":
                assert call["params"]["name"] == "web-search"
                self.queries.append(call["params"]["arguments"]["query"])
                return self.mcp


@contextmanager
def searx() -> Iterator[Searx]:
    found = Searx()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            assert self.path.startswith("/search?") and query["format"] == ["json"]
            found.queries.append(query["q"][0])
            self.reply(*found.answer(query["q"][0]))

        def do_DELETE(self) -> None:
            found.num_ended += 1
            if found.is_hasty:
                self.close_connection = True
            else:
                self.reply(200, b"")

        def do_POST(self) -> None:
            call = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.sessions.append(self.headers["mcp-session-id"])
            if "id" not in call:
                self.reply(202, b"")
                return
            body = json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": found.rpc(call)})
            self.reply(200, f"event: message\ndata: {body}\n\n".encode() if found.events else body.encode())

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("mcp-session-id", "s1")
            with suppress(OSError):  # nobody waits for it any more
                self.end_headers()
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield found
        server.shutdown()
