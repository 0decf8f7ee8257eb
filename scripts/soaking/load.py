"""Clients of every kind, drawn by a seed: patient, impatient, greedy, broken. Knows only the server's address."""

import json
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = (
    "What is the capital of France?",
    "Count to five.",
    "Say hello to Anna and to Ben.",
    "Which is larger, 12 or 21?",
    "Write the word tree backwards.",
    "List three colours. " * 20,
)
CHAT = "/v1/chat/completions"
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@dataclass
class Tally:
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)


def greedy(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}


def oracle(url: str, prompt: str) -> Any:
    """The reply to a prompt that runs alone."""
    answer = httpx.post(f"{url}{CHAT}", json=greedy(prompt), timeout=300, trust_env=False)
    return answer.raise_for_status().json()["choices"]


class Client:
    def __init__(self, url: str, oracles: dict[str, Any], tally: Tally, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        self._oracles, self._tally, self._chance = oracles, tally, random.Random(seed)

    def run(self, until_s: float) -> None:
        kinds = (self.ask, self.ask, self.stream, self.leave, self.guided, self.call_tool, self.message, self.bad,
                 self.oversize, self.cut, self.health)  # fmt: skip
        while time.monotonic() < until_s:
            kind = self._chance.choice(kinds)
            try:
                kind()
            except Exception as error:  # a client that the server broke is a finding, whatever broke it
                self._tally.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self._tally.done[kind.__name__] += 1

    def ask(self) -> None:
        prompt = self._chance.choice(PROMPTS)
        answer = self._http.post(CHAT, json=greedy(prompt))
        if answer.status_code == 429:
            return
        if answer.status_code != 200 or answer.json()["choices"] != self._oracles[prompt]:
            self._tally.wrong.append(f"ask {prompt[:20]!r}: {answer.status_code} {answer.text[:300]}")

    def stream(self) -> None:
        prompt = self._chance.choice(PROMPTS)
        answer = self._http.post(CHAT, json={**greedy(prompt), "stream": True})
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices"))
        if answer.status_code == 200 and text != (self._oracles[prompt][0]["message"]["content"] or ""):
            self._tally.wrong.append(f"stream {prompt[:20]!r}: {text[:300]}")

    def leave(self) -> None:
        body = {**greedy(self._chance.choice(PROMPTS)), "stream": True, "max_tokens": 500}
        with self._http.stream("POST", CHAT, json=body) as answer:
            for _, _chunk in zip(range(self._chance.randrange(4)), answer.iter_raw(), strict=False):
                pass

    def guided(self) -> None:
        answer = self._http.post(CHAT, json={**greedy("Give a number."), "guided_json": SCHEMA, "max_tokens": 200})
        if answer.status_code == 200 and (choice := answer.json()["choices"][0])["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])

    def call_tool(self) -> None:
        tools = [{"type": "function", "function": TOOL}]
        body = {**greedy("How is the weather in Rome?"), "tools": tools, "tool_choice": "required", "max_tokens": 300}
        answer = self._http.post(CHAT, json=body)
        for call in answer.json()["choices"][0]["message"].get("tool_calls") or [] if answer.is_success else []:
            json.loads(call["function"]["arguments"])

    def message(self) -> None:
        answer = self._http.post("/v1/messages", json={**greedy(self._chance.choice(PROMPTS)), "model": "demo"})
        if answer.status_code not in (200, 429):
            self._tally.wrong.append(f"message: {answer.status_code} {answer.text[:300]}")

    def bad(self) -> None:
        bodies = (b"{", b"[]", b"\xff", b'{"messages": 1}', b"[" * 5000, b'{"messages": [], "n": 0}')
        self._expect(400, self._chance.choice(bodies))

    def oversize(self) -> None:
        self._expect(413, b'{"user": "' + b"x" * 2_000_000 + b'"}')

    def cut(self) -> None:
        with socket.create_connection(self._address, timeout=30) as connection:
            whole = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
            connection.sendall(whole[: self._chance.randrange(1, len(whole))])

    def health(self) -> None:
        started_s = time.monotonic()
        if self._http.get("/health").status_code != 200:
            self._tally.wrong.append("health: not well")
        self._tally.health_s.append(time.monotonic() - started_s)

    def _expect(self, status: int, body: bytes) -> None:
        answer = self._http.post(CHAT, content=body, headers={"content-type": "application/json"})
        if answer.status_code != status:
            self._tally.wrong.append(f"expected {status}: {answer.status_code} {answer.text[:300]}")
