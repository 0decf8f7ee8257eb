"""The surroundings of a session: an operator who ends the client's prompt on the server, and a proxy that refuses every
connection and notes its target, so that a client reaches the server alone.
"""

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx

End = Literal["prompt", "text", "limit"]  # cancelled while it is read, or while it is answered; or it took too long
LIMIT_S = 3.0  # --max-request-s for the last of them
_PHASES = {"prompt": "prefill", "text": "generation"}
_AGENT_TOKENS = 2000  # requests for titles are shorter than the prompt of an agent
_LOOK_S = 0.05


@contextlib.contextmanager
def ending(url: str, end: End | None) -> Iterator[list[str]]:
    """Cancel the first agent's prompt in its phase, once, during the block. Yields the ids that were cancelled."""
    cancelled: list[str] = []
    if end not in _PHASES:
        yield cancelled
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(url, _PHASES[end], cancelled, is_over), daemon=True)
    thread.start()
    try:
        yield cancelled
    finally:
        is_over.set()
        thread.join(10)


def _watch(url: str, phase: str, cancelled: list[str], is_over: threading.Event) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        while not cancelled and not is_over.wait(_LOOK_S):
            rows: list[dict[str, Any]] = client.get("/v1/status").json()["requests"]
            for row in rows:
                if row["phase"] == phase and row["prompt_tokens"] >= _AGENT_TOKENS and not cancelled:
                    client.post(f"/v1/requests/{row['request_id']}/cancel").raise_for_status()
                    cancelled.append(row["request_id"])


_REFUSAL = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def walled_in(wanted: list[str]) -> Iterator[dict[str, str]]:
    """Yield the environment that sends every client there. Hosts that were asked for are added to `wanted`."""

    class Refusing(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words = self.rfile.readline(4096).decode("latin-1").split()
            if len(words) > 1:
                wanted.append(words[1])
            with contextlib.suppress(OSError):
                self.wfile.write(_REFUSAL)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusing) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        proxied = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), address)
        direct = {"NO_PROXY": "127.0.0.1,localhost"}
        both = {**proxied, **direct}
        try:
            yield {**both, **{name.lower(): value for name, value in both.items()}}
        finally:
            server.shutdown()
            thread.join(10)
