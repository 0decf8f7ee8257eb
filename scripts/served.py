"""Servers for the tools, each a process of its own on a free loopback port, and streams with the moments of their text.

The load is light, because it shares the machine with the server that it measures: one thread and bare sockets read all
streams, and the bytes are parsed only after the load is over. Nothing here judges a reply.
"""

import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx

from scripts._replay import trace
from vllm_mlx.cli.remote import Remote, event_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL_NAME = "default_model"  # mlx-lm's server's name for the one it was started with
_ANSWER_S = 1800.0  # a long prompt on a slow Mac takes minutes
_SILENCE_S = 300.0  # a stream to which a server sends nothing for so long has failed
_START_S = 300.0
_STOP_S = 10.0
_LOG_TAIL = 2000  # characters shown of a server that did not start
_WARM_READS = 20  # a stream that was read from so often decodes
_ENDLESS = 30_000  # tokens of a reply that is cut short
Fields = dict[str, Any]
Messages = list[Fields]
Prompt = str | Messages  # a question, or a whole conversation
Text = Sequence[int] | str


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
    usage: Fields | None  # None if the stream was cut short

    @property
    def ttft_s(self) -> float:
        return self.deltas[0].at_s - self.sent_s

    @property
    def num_tokens(self) -> int:
        if self.usage is None:
            raise BenchmarkError("A stream ended without its usage block.")
        return int(self.usage["completion_tokens"])

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s([self])

    def tokens_after(self, start_s: float, end_s: float) -> float:
        """Return tokens that came in `(start_s, end_s]`, by their share of the characters: deltas may carry several."""
        total = sum(delta.num_chars for delta in self.deltas)
        inside = sum(delta.num_chars for delta in self.deltas if start_s < delta.at_s <= end_s)
        return self.num_tokens * inside / total

    def worst_gap_s(self, start_s: float = 0.0) -> float:
        """Return the longest time between two neighbouring deltas, the later of which came after `start_s`."""
        moments = [delta.at_s for delta in self.deltas]
        return max((later - earlier for earlier, later in pairwise(moments) if later > start_s), default=0.0)


def tokens_per_s(replies: Sequence[Reply]) -> float:
    """Return tokens/s of all replies together, between the last one's first token and the first one's last token."""
    start_s = max(reply.deltas[0].at_s for reply in replies)
    end_s = min(reply.deltas[-1].at_s for reply in replies)
    if end_s <= start_s:
        raise BenchmarkError(f"{len(replies)} replies did not run at the same time.")
    return sum(reply.tokens_after(start_s, end_s) for reply in replies) / (end_s - start_s)


class Stream:
    """One request for a streamed reply: connected, then sent, then read. Its clock starts when it is sent."""

    def __init__(self, port: int, path: str, body: Fields):
        self._request = _request(port, path, body)
        self._received: list[tuple[float, bytes]] = []
        self.sent_s = 0.0
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_SILENCE_S)
        self.is_open = True

    @property
    def num_reads(self) -> int:
        return len(self._received)

    def send(self) -> None:
        self.sent_s = time.perf_counter()
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
                delta = choice.get("delta") or {"content": choice.get("text")}  # a template may open a thought
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                if text:
                    deltas.append(Delta(at_s, len(text)))
        return Reply(self.sent_s, tuple(deltas), usage)

    def message(self) -> Fields:
        """Return the reply as the message that an agent sends back: its content, its reasoning and its tool calls."""
        whole = trace.Reply()
        for _, event in _events(self._received):
            trace.CHAT.feed(whole, event)
        return whole.turn[0]


def start(
    port: int, prompts: Iterable[Prompt], max_tokens: int, fields: Mapping[str, Any] | None = None
) -> list[Stream]:
    """Ask for greedy replies of a chat."""
    chats = ([{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts)
    return _started(port, CHAT, [{"messages": each, "max_tokens": max_tokens, **(fields or {})} for each in chats])


def _started(port: int, path: str, bodies: Iterable[Fields]) -> list[Stream]:
    """Connect all streams before the first request is sent, because a server may be slow to accept a crowd."""
    streams = [Stream(port, path, body) for body in bodies]
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


def worst_gap_s(port: int, prompts: Iterable[Prompt], late: Prompt, max_tokens: int) -> float:
    """Return the longest pause of any of the streams that decode, from the arrival of a late prompt to its reply."""
    decoders = start(port, prompts, _ENDLESS)
    read(decoders, until=lambda: min(stream.num_reads for stream in decoders) >= _WARM_READS)
    [other] = start(port, [late], max_tokens)
    read([*decoders, other], until=lambda: not other.is_open)
    if not all(stream.is_open for stream in decoders):
        raise BenchmarkError("A decoding stream ended before the late prompt was answered.")
    for stream in decoders:
        stream.close()
    return max(stream.reply().worst_gap_s(other.sent_s) for stream in decoders)


def _request(port: int, path: str, body: Fields) -> bytes:
    streamed = {"model": MODEL_NAME, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({**streamed, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def _events(received: list[tuple[float, bytes]]) -> Iterator[tuple[float, Fields]]:
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


class Server:
    """A server of this checkout."""

    def __init__(self, process: subprocess.Popen[bytes], port: int):
        self.process, self.port, self.url = process, port, f"http://127.0.0.1:{port}"
        self._remote = Remote(self.url, answer_s=60)
        self._chance = random.Random(0)
        self._vocabulary = int(self.status()["model_facts"]["vocab_size"])

    def status(self) -> Fields:
        return self._remote.status()

    def answer(self, path: str, body: Fields) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": MODEL_NAME, **body}, timeout=_ANSWER_S, trust_env=False)

    def post(self, path: str, body: Fields) -> Fields:
        return dict(self.answer(path, body).raise_for_status().json())

    def prompt(self, num_tokens: int) -> list[int]:
        """Draw ids from the middle of the vocabulary, where no special tokens are: no prompt repeats another."""
        low, high = self._vocabulary // 4, self._vocabulary // 2
        return [self._chance.randrange(low, high) for _ in range(num_tokens)]

    def complete(self, prompt: Text, num_tokens: int, **fields: Any) -> Fields:
        """Ask for one greedy reply of exactly `num_tokens` tokens."""
        return self.post(COMPLETIONS, {"temperature": 0, **_exactly(prompt, num_tokens), **fields})

    def stream(self, prompt: Text, num_tokens: int, *, most_reads: int | None = None) -> Reply:
        """Stream such a reply. After `most_reads` reads, leave it where it is."""
        [stream] = _started(self.port, COMPLETIONS, [_exactly(prompt, num_tokens)])
        read([stream], until=lambda: most_reads is not None and stream.num_reads >= most_reads)
        stream.close()
        return stream.reply()

    def streams(self, prompts: Iterable[Text], num_tokens: int) -> list[Reply]:
        """Stream the replies to all prompts together."""
        streams = _started(self.port, COMPLETIONS, [_exactly(prompt, num_tokens) for prompt in prompts])
        read(streams)
        return [stream.reply() for stream in streams]

    def stop(self) -> int:
        """Send SIGTERM. Return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _exactly(prompt: Text, num_tokens: int) -> Fields:
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def our_command(model: Path | str, port: int) -> list[str]:
    named = ("--served-model-name", MODEL_NAME, "--port", str(port))
    return [sys.executable, "-m", "vllm_mlx", "serve", str(model), *named]


@contextmanager
def serving(
    log: Path | None, model: str, *flags: str, port: int = 0, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve a model during the block. Its log is appended to `log`, if there is one."""
    port = port or free_port()
    with running([*our_command(model, port), *flags], port, log=log, variables=variables) as process:
        yield Server(process, port)


@contextmanager
def running(
    command: list[str],
    port: int,
    checkout: Path | None = None,
    *,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during the block, with the package of `checkout` if one is given. It is stopped in any case.

    `variables` are of the environment. No others of this program's are passed on.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_MLX_")}
    environment["VLLM_MLX_CACHE_DISK"] = "0"  # state of an earlier server would be read instead of computed
    environment |= variables or {}
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), environment.get("PYTHONPATH", "")])
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() if log is None else log.open("a+b") as file:
        # A new session: the terminal's Ctrl-C reaches this program alone, which then stops the server.
        process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdout=file, stderr=file, start_new_session=True
        )
        try:
            if not _await_ready(process, port):
                file.seek(0)
                tail = file.read().decode(errors="replace")[-_LOG_TAIL:]
                raise BenchmarkError(f"The server did not start: {' '.join(command)}\n{tail}")
            yield process
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).is_success:
                return True
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
