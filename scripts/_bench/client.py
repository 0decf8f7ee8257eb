"""A light load generator: bytes and the moments they came, parsed only after the load is over.

It shares the machine with the server it measures, so one thread and bare sockets read all streams.
"""

import json
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from scripts._replay import wire
from vllm_mlx.cli.remote import event_of

Messages = list[dict[str, Any]]
Prompt = str | Messages  # a question, or a whole conversation

MODEL_NAME = "default_model"  # mlx-lm's server's name for the one it was started with
_SILENCE_S = 120.0  # a server that sends nothing for so long has failed


class BenchmarkError(Exception):
    """The measurement cannot be made, or would mislead. The message says why."""


@dataclass(frozen=True, slots=True)
class Delta:
    at_s: float
    num_chars: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed reply. Moments are of `time.perf_counter`."""

    sent_s: float
    deltas: tuple[Delta, ...]
    usage: dict[str, Any] | None  # None if the stream was cut short

    @property
    def ttft_s(self) -> float:
        return self.deltas[0].at_s - self.sent_s

    @property
    def num_tokens(self) -> int:
        if self.usage is None:
            raise BenchmarkError("A stream ended without its usage block.")
        return int(self.usage["completion_tokens"])

    def tokens_after(self, start_s: float, end_s: float) -> float:
        """Return tokens that came in `(start_s, end_s]`, by their share of the characters: deltas may carry several."""
        total = sum(delta.num_chars for delta in self.deltas)
        inside = sum(delta.num_chars for delta in self.deltas if start_s < delta.at_s <= end_s)
        return self.num_tokens * inside / total

    def worst_gap_s(self, start_s: float) -> float:
        """Return the longest time between two neighbouring deltas, the later of which came after `start_s`."""
        moments = [delta.at_s for delta in self.deltas]
        return max(later - earlier for earlier, later in pairwise(moments) if later > start_s)


class Stream:
    """One request for a streamed reply: connected, then sent, then read. Its clock starts when it is sent."""

    def __init__(self, port: int, prompt: Prompt, max_tokens: int, fields: Mapping[str, Any] | None = None):
        self._request = _request(port, prompt, max_tokens, fields or {})
        self._received: list[tuple[float, bytes]] = []
        self._sent_s = 0.0
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_SILENCE_S)
        self.is_open = True

    @property
    def sent_s(self) -> float:
        return self._sent_s

    @property
    def num_reads(self) -> int:
        return len(self._received)

    def send(self) -> None:
        self._sent_s = time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> None:
        data = self.socket.recv(65536)
        if data:
            self._received.append((time.perf_counter(), data))
        else:
            self.close()

    def close(self) -> None:
        """Close the connection. Before the end of the reply, this makes the server abort."""
        self.is_open = False
        self.socket.close()

    def reply(self) -> Reply:
        usage, deltas = None, []
        for at_s, event in _events(self._received):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                delta = choice["delta"]  # a template may open a thought
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                if text:
                    deltas.append(Delta(at_s, len(text)))
        return Reply(self._sent_s, tuple(deltas), usage)

    def message(self) -> dict[str, Any]:
        """Return the reply as the message that an agent sends back: its content, its reasoning and its tool calls."""
        whole = wire.Reply()
        for _, event in _events(self._received):
            wire.CHAT.feed(whole, event)
        return whole.turn[0]


def start(
    port: int, prompts: Iterable[Prompt], max_tokens: int, fields: Mapping[str, Any] | None = None
) -> list[Stream]:
    """Connect all streams before the first request is sent, because a server may be slow to accept a crowd."""
    streams = [Stream(port, prompt, max_tokens, fields) for prompt in prompts]
    for stream in streams:
        stream.send()
    return streams


def read(streams: Iterable[Stream], until: Callable[[], bool] = lambda: False) -> None:
    """Read all streams until each has ended, or until the condition holds."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            if stream.is_open:
                selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map() and not until():
            ready = selector.select(_SILENCE_S)
            if not ready:
                raise BenchmarkError(f"No byte came for {_SILENCE_S:.0f} s.")
            for key, _ in ready:
                stream = key.data
                stream.receive()
                if not stream.is_open:
                    selector.unregister(key.fileobj)


def ask(port: int, prompts: Iterable[Prompt], max_tokens: int) -> list[Reply]:
    """Send all prompts at once, read all replies to their ends. Every reply has `max_tokens` tokens."""
    streams = start(port, prompts, max_tokens)
    read(streams)
    replies = [stream.reply() for stream in streams]
    for reply in replies:
        if reply.num_tokens != max_tokens:
            raise BenchmarkError(
                f"A reply stopped after {reply.num_tokens} of {max_tokens} tokens, so the two servers would not do the "
                "same work. Use a checkpoint that does not end its replies by itself, such as the default one."
            )
    return replies


def _request(port: int, prompt: Prompt, max_tokens: int, fields: Mapping[str, Any]) -> bytes:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def _events(received: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the JSON of each server-sent event, with the moment its last byte came."""
    raw = b"".join(data for _, data in received)
    ends = list(accumulate(len(data) for _, data in received))
    head, separator, _ = raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise BenchmarkError(f"A server answered: {raw[:500].decode(errors='replace')}")
    start = len(head) + len(separator)
    if b"transfer-encoding: chunked" in head.lower():
        pieces = _chunks(raw, start)
    else:
        pieces = ((max(begin, start), end) for begin, end in zip([0, *ends], ends, strict=False) if end > start)
    rest = b""
    for begin, end in pieces:
        *lines, rest = (rest + raw[begin:end]).split(b"\n")
        at_s = received[bisect_left(ends, end)][0]
        for line in lines:
            if (event := event_of(line.decode())) is not None:
                yield at_s, event


def _chunks(raw: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the data of each complete chunk of a chunked message."""
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        begin = line_end + 2
        end = begin + int(raw[start:line_end], 16)
        if end == begin or end > len(raw):
            return
        yield begin, end
        start = end + 2
