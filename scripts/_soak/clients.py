"""Clients of every kind, drawn by a seed: patient, impatient, greedy, broken. They know only the server's address.

They run in another process than the server, so that they measure the server alone, and print the results as JSON. Their
questions are greedy and have the replies that they have when nothing else runs: texts, images, tools, conversations.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.served import CHAT
from tests.support.harm.values import dumps
from tests.support.harm.wire import request
from tests.support.shapes import draw_shape
from vllm_mlx.cli.remote import events_of

PATIENCE_S = 900  # of a client, on a machine that does much else
Body = dict[str, Any]

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def shown(color: str, shape: str) -> Body:
    file = io.BytesIO()
    draw_shape(color, shape, 112).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def user(*content: str | Body) -> Body:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def greedy(*messages: Body, max_tokens: int = 24, **fields: Any) -> Body:
    return {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens, **fields}


QUESTIONS: dict[str, Body] = {
    "france": greedy(user("What is the capital of France?")),
    "count": greedy(user("Count to five.")),
    "names": greedy(user("Say hello to Anna and to Ben.")),
    "larger": greedy(user("Which is larger, 12 or 21?")),
    "backwards": greedy(user("Write the word tree backwards.")),
    "colours": greedy(user("List three colours. " * 20)),
    "long prompt": greedy(user("The fox sees the river and the hill. " * 80 + "What does the fox see?")),
    "long reply": greedy(user("What is 2 + 3?"), max_tokens=600, ignore_eos=True),
    "two replies": greedy(user("What is 4 + 3?"), n=2),
    "circle": greedy(user("What is in this image?", shown("red", "circle"))),
    "star": greedy(user("What is in this image?", shown("blue", "star"))),
    "pictures": greedy(user("What is in these images?", shown("green", "square"), shown("yellow", "triangle"))),
    "tools": greedy(user("How is the weather in Rome?"), max_tokens=64, tools=TOOLS),
    "tool result": greedy(
        user("How is the weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        tools=TOOLS,
    ),
    "talk": greedy(
        user("What is in this image?", shown("red", "circle")),
        {"role": "assistant", "content": "A red circle."},
        user("What is 3 + 4?"),
    ),
}  # fmt: skip


def said(choices: list[Any]) -> list[Any]:
    """Return the parts of a reply that are equal each time: all but the ids of calls."""
    return [
        (
            choice["message"].get("content"),
            choice["message"].get("reasoning_content"),
            [call["function"] for call in choice["message"].get("tool_calls") or []],
            choice["finish_reason"],
        )
        for choice in choices
    ]


def oracles(http: httpx.Client) -> dict[str, list[Any]]:
    """Return the reply to each question when nothing else runs."""
    return {name: _oracle(http, name, body) for name, body in QUESTIONS.items()}


def _oracle(http: httpx.Client, name: str, body: Body) -> list[Any]:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, f"{name}: {answer.text}"
    return said(answer.json()["choices"])


async def ask(port: int, body: Body | bytes, key: str = "none") -> int:
    """Read a reply to its end, over a connection of its own. Return the status, or 0 without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(CHAT, body if isinstance(body, bytes) else dumps(body), key))
        await writer.drain()
        words = (await reader.readline()).split()
        status, seen = int(words[1]) if words else 0, b""
        while status == 200 and not (b"[DONE]" in seen or b'"usage"' in seen):
            if not (part := await reader.read(65536)):
                break
            seen = seen[-16:] + part
        return status
    finally:
        writer.close()


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NO_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
BUSY = 429


@dataclass
class Tally:
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)


class Client:
    def __init__(self, url: str, expected: dict[str, list[Any]], tally: Tally, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)
        self._address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        self._expected, self._tally, self._chance = expected, tally, random.Random(seed)

    def run(self, until_s: float) -> None:
        kinds = (self.ask, self.ask, self.ask, self.stream, self.stream, self.leave, self.give_up, self.cancel,
                 self.guided, self.call_tool, self.message, self.response, self.bad, self.bad_picture, self.oversize,
                 self.cut)  # fmt: skip
        while time.monotonic() < until_s:
            kind, started_s = self._chance.choice(kinds), time.monotonic()
            try:
                kind()
            except Exception as error:  # a client that the server broke is a finding, whatever broke it
                self._wrong(f"{kind.__name__}: {type(error).__name__}: {error}")
            self._tally.done[kind.__name__] += 1
            longest_s = self._tally.slowest_s.get(kind.__name__, 0.0)
            self._tally.slowest_s[kind.__name__] = max(longest_s, round(time.monotonic() - started_s, 1))

    def ask(self) -> None:
        name = self._chance.choice(list(QUESTIONS))
        answer = self._http.post(CHAT, json=QUESTIONS[name])
        if self._is_answered(f"ask {name}", answer):
            self._compare(f"ask {name}", said(answer.json()["choices"]), self._expected[name])

    def stream(self) -> None:
        name = self._chance.choice(list(QUESTIONS))
        answer = self._http.post(CHAT, json={**QUESTIONS[name], "stream": True})
        if not self._is_answered(f"stream {name}", answer):
            return
        texts = [""] * len(self._expected[name])
        chunks = events_of(answer.text.splitlines())
        for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        self._compare(f"stream {name}", texts, [each[0] or "" for each in self._expected[name]])

    def leave(self) -> None:
        body = {**self._question(), "stream": True, "max_tokens": 500}
        with self._http.stream("POST", CHAT, json=body) as answer:
            for _, _chunk in zip(range(self._chance.randrange(4)), answer.iter_raw(), strict=False):
                pass

    def give_up(self) -> None:
        try:
            self._http.post(CHAT, json=self._question(), timeout=self._chance.uniform(0.001, 0.5))
        except httpx.TimeoutException:
            self._tally.done["gave up"] += 1

    def cancel(self) -> None:
        body = {**greedy(user("Go on."), max_tokens=300, ignore_eos=True), "stream": True}
        with self._http.stream("POST", CHAT, json=body) as answer:
            chunks = events_of(answer.iter_lines())
            stopped = self._http.post(f"/v1/requests/{next(chunks)['id']}/cancel")
            self._tally.done["cancelled"] += stopped.status_code == 200
            for _ in chunks:
                pass

    def guided(self) -> None:
        answer = self._http.post(CHAT, json=greedy(user("Give a number."), max_tokens=200, guided_json=SCHEMA))
        if self._is_answered("guided", answer) and (choice := answer.json()["choices"][0])["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])

    def call_tool(self) -> None:
        question = greedy(user("How is the weather in Rome?"), max_tokens=300, tools=TOOLS, tool_choice="required")
        answer = self._http.post(CHAT, json=question)
        if self._is_answered("call_tool", answer) and (choice := answer.json()["choices"][0])["message"]["tool_calls"]:
            for call in choice["message"]["tool_calls"] if choice["finish_reason"] == "tool_calls" else ():
                json.loads(call["function"]["arguments"])

    def message(self) -> None:
        body = {"model": "demo", "max_tokens": 24, "messages": [{"role": "user", "content": "Count to five."}]}
        self._is_answered("message", self._http.post("/v1/messages", json=body))

    def response(self) -> None:
        body = {"input": "Count to five.", "max_output_tokens": 24, "stream": self._chance.random() < 0.5}
        self._is_answered("response", self._http.post("/v1/responses", json=body))

    def bad(self) -> None:
        bodies = (b"{", b"[]", b"\xff", b'{"messages": 1}', b"[" * 5000, b'{"messages": [], "n": 0}')
        self._expect(400, self._chance.choice(bodies))

    def bad_picture(self) -> None:
        pictures = [shown("red", "star")] * self._chance.randrange(2)
        self._expect(400, json.dumps(greedy(user("What is this?", *pictures, NO_PICTURE))).encode())

    def oversize(self) -> None:
        self._expect(413, b'{"user": "' + b"x" * 2_000_000 + b'"}')

    def cut(self) -> None:
        with socket.create_connection(self._address, timeout=30) as connection:
            whole = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
            connection.sendall(whole[: self._chance.randrange(1, len(whole))])

    def _question(self) -> dict[str, Any]:
        return QUESTIONS[self._chance.choice(list(QUESTIONS))]

    def _is_answered(self, what: str, answer: httpx.Response) -> bool:
        """Return whether the reply is complete. Of valid requests, only the refusal by a full queue is no finding."""
        if answer.status_code == BUSY:
            self._tally.refused[what.split()[0]] += 1
        elif answer.status_code != 200:
            self._wrong(f"{what}: {answer.status_code} {answer.text[:300]}")
        return answer.status_code == 200

    def _compare(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self._wrong(f"{what}: {found!r} instead of {expected!r}")

    def _expect(self, status: int, body: bytes) -> None:
        answer = self._http.post(CHAT, content=body, headers={"content-type": "application/json"})
        if answer.status_code not in (status, BUSY):
            self._wrong(f"expected {status}: {answer.status_code} {answer.text[:300]}")

    def _wrong(self, what: str) -> None:
        self._tally.wrong.append(what)
        print(what, file=sys.stderr, flush=True)


def main() -> None:
    options = argparse.Namespace(**json.loads(sys.argv[1]))  # of `scripts/soak`, and the server's `url`
    with httpx.Client(base_url=options.url, timeout=PATIENCE_S, trust_env=False) as http:
        expected = oracles(http)
    tally, until_s = Tally(), time.monotonic() + 60 * options.minutes
    clients = [Client(options.url, expected, tally, options.seed + number) for number in range(options.clients)]
    threads = [threading.Thread(target=client.run, args=(until_s,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(vars(tally)))


if __name__ == "__main__":
    main()
