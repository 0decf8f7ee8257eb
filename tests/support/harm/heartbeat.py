"""Other clients beside an attack: `/health` every 20 ms, one running stream, and short chats with a key of their own.

A process of its own, so that the attacker's work is not measured as the server's. It reads `beat`, with the names of
the clients, and `rest` from its standard input, and writes what it saw between them as one line of JSON.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

HEALTH_S = 0.02
CHAT_S = 0.15
PATIENCE_S = 60.0  # for an answer that has not come when the heartbeat is to rest
CLIENTS = ("health", "stream", "chat")
CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 2}
LONG = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 1500, "ignore_eos": True}
_CODE = re.compile(rb'"(?:code|type)":"([^"]*)"[^"]*\}\}?$')
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning)":"[^"]')


@dataclass
class Seen:
    """Durations in seconds."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between the tokens of the stream
    ttft_s: list[float] = field(default_factory=list)  # to the first token of a short chat
    num_refused: int = 0  # streams and chats
    own_delay_s: float = 0.0  # the longest time by which this process itself was late
    faults: list[str] = field(default_factory=list)


class Heartbeat:
    """The process, from the side of the driver."""

    def __init__(self, port: int, key: str, *, chat_bytes: int = 0, patience_s: float = PATIENCE_S) -> None:
        """`chat_bytes`: so much longer are the bodies of the short chats."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.harm.heartbeat", str(port), key, str(chat_bytes), str(patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def beat(self, *clients: str) -> None:
        """`clients`: `health`, `stream` and `chat`, or some of them. Returns when the stream runs."""
        self._tell(f"beat {' '.join(clients or CLIENTS)}")
        assert self._hear() == "beats"

    def rest(self) -> Seen:
        """Waits for the answers that are still to come."""
        self._tell("rest")
        return Seen(**json.loads(self._hear()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")


class _Beats:
    """The clients, in the process of the heartbeat."""

    def __init__(self, port: int, key: str, chat_bytes: int, patience_s: float) -> None:
        self._port, self._key, self._patience_s = port, key, patience_s
        self._short = {**SHORT, "metadata": {"padding": "x" * chat_bytes}}
        self._seen = Seen()
        self._stopped = asyncio.Event()
        self._streams = asyncio.Event()

    async def until(self, names: list[str], stop: Callable[[], Coroutine[Any, Any, None]]) -> Seen:
        clients = {"health": self._look, "stream": self._stream, "chat": self._chat}
        tasks = [asyncio.create_task(self._fenced(clients[name])) for name in names]
        if "stream" in names:
            await asyncio.wait({asyncio.create_task(self._streams.wait())}, timeout=self._patience_s)
        print("beats", flush=True)
        await stop()
        self._stopped.set()
        _, late = await asyncio.wait(tasks, timeout=self._patience_s)
        for task in late:
            task.cancel()
            self._seen.faults.append(f"another client waited {self._patience_s:g} s for an answer")
        return self._seen

    async def _fenced(self, client: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await client()
        except (OSError, EOFError) as error:
            self._seen.faults.append(f"another client's connection broke: {type(error).__name__}")
            self._streams.set()

    async def _look(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while True:
            is_last = self._stopped.is_set()
            started_s = time.monotonic()
            writer.write(HEALTH)
            status = await reader.readline()
            await reader.readuntil(b"}")
            self._seen.health_s.append(time.monotonic() - started_s)
            if b" 200 " not in status:
                self._fault(f"/health answered {status!r}")
            if is_last:
                break
            await self._sleep(HEALTH_S)
        writer.close()

    async def _stream(self) -> None:
        while not self._stopped.is_set():
            last_s: float | None = None
            async with aclosing(self._reply(LONG)) as parts:
                async for at_s, part in parts:
                    if last_s is not None:
                        self._seen.gaps_s.append(at_s - last_s)
                    last_s = at_s if _TEXT.search(part) or last_s else None
                    if last_s is not None:
                        self._streams.set()
                        if self._stopped.is_set():
                            break

    async def _chat(self) -> None:
        while not self._stopped.is_set():
            started_s = time.monotonic()
            async with aclosing(self._reply(self._short)) as parts:
                ttft_s = None
                async for at_s, part in parts:
                    if ttft_s is None and _TEXT.search(part):
                        ttft_s = at_s - started_s
            if ttft_s is not None:
                self._seen.ttft_s.append(ttft_s)
            await self._sleep(CHAT_S)

    async def _reply(self, body: dict[str, Any]) -> AsyncIterator[tuple[float, bytes]]:
        """What comes of a streamed reply, each with the time at which it came."""
        data = json.dumps({**body, "stream": True, "temperature": 0}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Authorization: Bearer {self._key}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                self._seen.num_refused += 1
                code = _CODE.search(await reader.read())
                self._fault(f"another key was answered {status[9:12].decode()} ({code[1].decode() if code else '-'})")
                await self._sleep(CHAT_S)
                return
            while part := await reader.read(65536):
                yield time.monotonic(), part
        finally:
            writer.close()

    async def _sleep(self, duration_s: float) -> None:
        started_s = time.monotonic()
        await asyncio.sleep(duration_s)
        self._seen.own_delay_s = max(self._seen.own_delay_s, time.monotonic() - started_s - duration_s)

    def _fault(self, what: str) -> None:
        if what not in self._seen.faults:
            self._seen.faults.append(what)


async def _serve(port: int, key: str, chat_bytes: int, patience_s: float) -> None:
    words = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)

    async def rest() -> None:
        await words.readline()

    while line := await words.readline():
        _, *names = line.decode().split()
        print(json.dumps(vars(await _Beats(port, key, chat_bytes, patience_s).until(names, rest))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("key")
    parser.add_argument("chat_bytes", type=int)
    parser.add_argument("patience_s", type=float)
    options = parser.parse_args()
    asyncio.run(_serve(options.port, options.key, options.chat_bytes, options.patience_s))


if __name__ == "__main__":
    main()
