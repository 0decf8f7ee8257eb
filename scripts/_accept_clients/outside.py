"""A proxy that refuses every connection and notes its target, so that a client reaches the server alone."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator

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
