"""Grammars made to do harm, over HTTP: each is refused, and others are served meanwhile."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harm.vitals import Vitals
from tests.support.running import Running, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner import row_constraint

HI: Any = [{"role": "user", "content": "hi"}]
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}
ANN, BEN = ({"Authorization": f"Bearer {key}"} for key in ("ann", "ben"))
NESTED = "((((a{100}){100}){100}){100})"
EMPTY = "(|a)" * 20_000
DOUBLING: Any = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2, "properties": {"a": {}}} for n in range(40)}


def form(schema: Any) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(parameters: Any, **more: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]}


ATTACKS: dict[str, Any] = {
    "nested counts": {"structured_outputs": {"regex": NESTED}},
    "empty alternatives": {"guided_regex": EMPTY},
    "escapes": {"guided_grammar": 'start: "a"\n' + '\\"' * 60_000},
    "a pattern": form({"type": "string", "pattern": f"^{NESTED}$"}),
    "a strict tool": tool({"properties": {"a": {"type": "string", "pattern": EMPTY}}}, strict=True),
    "joined references": {
        **tool({"$ref": "#/$defs/D0", "properties": {"b": {}}, "$defs": {**DOUBLING, "D40": {}}}),
        "tool_choice": "required",
    },
    "optional literals": {"guided_grammar": "start: " + '"a"? ' * 20_000},
    "terminals that double": {
        "guided_grammar": 'start: T13\nT0: "a"?\n' + "\n".join(f"T{n + 1}: T{n} T{n}" for n in range(13))
    },
    "joined patterns": form({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(40)]}),
    "joined alternatives": form({"allOf": [{"anyOf": [{"properties": {f"a{n}": {}}}, {}]} for n in range(60)]}),
    "many divisors": form({"prefixItems": [{"type": "integer", "multipleOf": 99_991 + n} for n in range(50)]}),
}
SERVED = ("joined alternatives",)  # its grammar is cheap enough to be followed
ALWAYS = ("nested counts", "joined references")


@pytest.fixture
def server(checkpoint: Callable[..., Path]) -> Iterator[Running]:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=2048, tool_call_parser="hermes"))
    with serving(engine, api_keys=("ann", "ben")) as running:
        yield running


class Canary:
    """Asks for `/health` and reads a plain reply of another key, as long as it lives. `counts`: answers, and tokens."""

    def __init__(self, server: Running):
        self._server = server
        self._is_over = threading.Event()
        self.counts = [0, 0]
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._read)]

    def __enter__(self) -> "Canary":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with self._server.http() as http:
            while not self._is_over.wait(0.02):
                self.counts[0] += http.get("/health").status_code == 200

    def _read(self) -> None:
        body = {"prompt": "a b c", "stream": True, "ignore_eos": True, "max_tokens": 1500}
        with self._server.http(headers=BEN) as http:
            while not self._is_over.is_set():
                with http.stream("POST", "/v1/completions", json=body) as reply:
                    for line in reply.iter_lines():
                        self.counts[1] += '"text"' in line
                        if self._is_over.is_set():
                            break


@pytest.mark.parametrize("kinds", [ALWAYS, pytest.param(tuple(ATTACKS), marks=pytest.mark.full)], ids=["some", "all"])
def test_each_attack_is_refused_and_others_are_served_meanwhile(server: Running, kinds: tuple[str, ...]) -> None:
    vitals = Vitals(os.getpid())
    with Canary(server) as canary, server.http(headers=ANN) as http:
        http.post("/v1/chat/completions", json={"messages": HI, "guided_regex": "a", "max_tokens": 4, **OFF})
        before = vitals.memory_bytes()
        for kind in kinds:
            counts = list(canary.counts)
            asked = {"messages": HI, "max_tokens": 30, **OFF, **ATTACKS[kind]}
            reply = http.post("/v1/chat/completions", json=asked)
            if kind not in SERVED:
                assert reply.status_code == 400, (kind, reply.status_code, reply.text[:300])
                assert reply.json()["error"]["type"] == "invalid_request_error"
            took_s = reply.elapsed.total_seconds()
            served = [now - then for now, then in zip(canary.counts, counts, strict=True)]
            assert min(served) >= int(took_s), (kind, took_s, served)
        assert vitals.memory_bytes() - before < 200 << 20


def test_a_grammar_that_was_too_slow_is_refused_and_others_are_served(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every grammar is too slow here, because there is no allowance."""
    monkeypatch.setattr(row_constraint, "START_S", 0.0)
    monkeypatch.setattr(row_constraint, "TOKEN_S", 0.0)
    guided = {"messages": HI, "max_tokens": 20, "guided_regex": "[a-z]{20}", **OFF}
    plain = {"messages": HI, "max_tokens": 2, **OFF}
    with server.http(headers=ANN) as ann, server.http(headers=BEN) as ben:
        for client in (ann, ben):  # the first reply of a key begins
            assert "ended" in client.post("/v1/chat/completions", json=guided).json()["error"]["message"]
        for stream in (False, True):
            reply = ann.post("/v1/chat/completions", json={**guided, "stream": stream})
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "grammar_limit"
            assert "too slow" in reply.json()["error"]["message"]
        assert ann.post("/v1/chat/completions", json=plain).status_code == 200
        monkeypatch.setattr(row_constraint, "START_S", 1.0)
        assert ann.post("/v1/chat/completions", json={**guided, "guided_regex": "[a-z]{19}"}).status_code == 200
