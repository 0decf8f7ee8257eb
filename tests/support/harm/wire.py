"""Raw HTTP over sockets: requests sent whole, slowly, cut short, pipelined, or by a client that leaves.

Knows no protocol above HTTP.
"""

import contextlib
import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Shot:
    """What one connection sends, and whether it reads the answers."""

    pieces: tuple[bytes, ...]
    pause_s: float = 0.0  # between two pieces
    num_answers: int = 1  # 0: the client closes the connection after the last piece without reading
    must_answer: bool = True  # the server may close a connection without an answer where the request is incomplete

    @property
    def num_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers to one shot. `missing` says why there are fewer than expected."""

    answers: tuple[Answer, ...]
    missing: str | None = None


def request(path: str, body: bytes, key: str, *, declared: int | None = None, method: str = "POST") -> bytes:
    """`declared`: the content length that the header states, if it is not the real one."""
    length = len(body) if declared is None else declared
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    lines += [f"Content-Type: {JSON}", f"Content-Length: {length}", "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(path: str, body: bytes, key: str, size: int) -> bytes:
    """The body in chunks of `size` bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    head = "\r\n".join([*lines, f"Content-Type: {JSON}", "Transfer-Encoding: chunked", "", ""]).encode()
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def cut(data: bytes, num_pieces: int) -> tuple[bytes, ...]:
    """`data` in pieces of nearly one size."""
    size = max(1, -(-len(data) // num_pieces))
    return tuple(data[start : start + size] for start in range(0, len(data), size))


def fire(port: int, shots: tuple[Shot, ...], timeout_s: float) -> list[Outcome]:
    """Sends every shot over a connection of its own, all at once."""
    with ThreadPoolExecutor(len(shots)) as pool:
        return list(pool.map(lambda shot: _fire(port, shot, timeout_s), shots))


def _fire(port: int, shot: Shot, timeout_s: float) -> Outcome:
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    except OSError as error:
        return Outcome((), f"the connection was refused ({error})")
    with connection:
        if shot.num_answers == 0:
            _send(connection, shot)
            return Outcome(())
        sender = threading.Thread(target=_send, args=(connection, shot), daemon=True)
        sender.start()
        outcome = _read(connection, shot.num_answers, time.monotonic() + timeout_s)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        sender.join(timeout_s)
        return outcome


def _send(connection: socket.socket, shot: Shot) -> None:
    """Stops where the server closes the connection: it may refuse before it has read everything."""
    with contextlib.suppress(OSError):
        for piece in shot.pieces:
            connection.sendall(piece)
            if shot.pause_s:
                time.sleep(shot.pause_s)


class _LastingFile:
    """A socket's file that stays open from one response to the next."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def makefile(self, *_arguments: object, **_options: object) -> "_LastingFile":
        return self

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _read(connection: socket.socket, num_answers: int, deadline_s: float) -> Outcome:
    file, answers = _LastingFile(connection), []
    try:
        while len(answers) < num_answers:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            response = http.client.HTTPResponse(file)  # type: ignore[arg-type]
            response.begin()
            answers.append(Answer(response.status, response.headers.get("content-type", ""), response.read()))
    except TimeoutError:
        return Outcome(tuple(answers), "no answer came in time")
    except (OSError, http.client.HTTPException) as error:
        return Outcome(tuple(answers), f"the connection was closed ({type(error).__name__})")
    return Outcome(tuple(answers))
