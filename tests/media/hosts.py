"""A web server that misbehaves as told, on a port of its own, and a resolver that says where names lead."""

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.media.fetch import MediaFetcher

Answer = Callable[[socket.socket], None]
HERE = "127.0.0.1"


def reply(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Answer:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return lambda connection: connection.sendall("\r\n".join([*head, "", ""]).encode() + body)


def image(body: bytes, *headers: str) -> Answer:
    return reply(body, "Content-Type: image/png", *headers)


def redirect(location: str, status: str = "302 Found", *headers: str) -> Answer:
    return reply(b"", f"Location: {location}", *headers, status=status)


def drip(start: bytes, piece: bytes, pause_s: float = 0.02, pieces: int = 10**6) -> Answer:
    """Sends for as long as somebody listens."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(pieces):
            connection.sendall(piece)
            if pause_s:
                threading.Event().wait(pause_s)

    return answer


@dataclass
class Host:
    port: int
    routes: dict[str, Answer | list[Answer]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # their heads
    num_open: int = 0  # connections

    def url(self, path: str, name: str = "pictures.test") -> str:
        return f"http://{name}:{self.port}{path}"

    def paths(self) -> list[str]:
        return [request.split(" ")[1] for request in self.requests]

    def answer(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.recv(65536)
            if not piece:
                return
            head += piece
        text = head.decode("latin-1")
        self.requests.append(text)
        found = self.routes.get(text.split(" ")[1], reply(b"", status="404 Not Found"))
        (found.pop(0) if isinstance(found, list) else found)(connection)


@contextlib.contextmanager
def host(tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            running.num_open += 1
            with contextlib.suppress(OSError):
                wrapped = self.request if tls is None else tls.wrap_socket(self.request, server_side=True)
                running.answer(wrapped)
                wrapped.shutdown(socket.SHUT_WR)
                while wrapped.recv(65536):
                    pass
            running.num_open -= 1

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    with Server((HERE, 0), Handler) as server:
        running = Host(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Names:
    """Where names lead; a list is what successive look-ups say. Any other name is none."""

    leads: dict[str, str | list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hang: dict[str, threading.Event] = field(default_factory=dict)  # no answer for these names before the event

    def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append(name)
        if name in self.hang:
            self.hang[name].wait(60)
        found = self.leads.get(name)
        if found is None:
            raise socket.gaierror("unknown")
        return (found.pop(0) if isinstance(found, list) else found).split(",")


def is_here(address: str) -> bool:
    """In these tests this machine's first address counts as public, and no other does."""
    return address == HERE


def web(names: Names, *, tls: ssl.SSLContext | None = None, **config: object) -> MediaFetcher:
    context = tls or ssl.create_default_context()
    return MediaFetcher(MediaConfig(**config), resolve=names, is_allowed=is_here, ssl_context=context)
