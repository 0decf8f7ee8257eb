"""No request harms anybody else: a real server with two keys is attacked, beside other clients.

Each class of attack that ever succeeded stands here with a request of it, and some are drawn for each protocol.
`scripts/fuzz --what harm` draws on.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harm.cases import Drawing, sealed_word
from tests.support.harm.driver import Attack
from tests.support.harm.fields import Document
from tests.support.harm.gate import Gate, attack
from tests.support.harm.judge import faults_of_answer
from tests.support.harm.media import blank_png
from tests.support.harm.protocols import PROTOCOLS
from tests.support.harm.target import ATTACKER
from tests.support.harm.values import SURROGATE, Raw, dumps, repeated
from tests.support.harm.wire import Shot, fire, request
from tests.support.rows import cases

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (PROTOCOLS[name].paths[0] for name in PROTOCOLS)
HUGE = Raw("1" + "0" * 400)
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b" | '


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def document(gate: Gate) -> Document:
    return Document(gate.driver.target.get("/openapi.json").json())


def chat(content: Any = "Hi", **fields: Any) -> Any:
    return PROTOCOLS["chat"].say(content) | fields


def response(**fields: Any) -> Any:
    return {"input": "Hi", "max_output_tokens": 1, **fields}


def tool(protocol: str, schema: Any, choice: str = "auto") -> Any:
    make = PROTOCOLS[protocol].tool
    assert make is not None
    return make(schema, choice)


def sealed(protocol: str, num: int) -> Any:
    make = PROTOCOLS[protocol].thoughts
    assert make is not None
    return make(sealed_word(b"a"), num)


def frames(side: int, *others: str) -> Any:
    return chat([{"type": "video", "video": [*[blank_png(side)] * 8, *others]}])


ATTACKS: dict[str, Attack] = {
    "a background response that cannot be echoed": attack(
        RESPONSES, response(metadata={"k": SURROGATE}, background=True), num=3
    ),
    "wrong messages": attack(CHAT, {"messages": repeated(0, 500_000)}),
    "wrong prompts": attack(COMPLETIONS, {"prompt": repeated({}, 500_000)}),
    "wrong items": attack(RESPONSES, {"input": repeated(0, 500_000)}),
    "wrong blocks": attack(MESSAGES, chat(repeated(0, 500_000))),
    "small parts": attack(CHAT, chat(repeated({"type": "text", "text": ""}, 10_000_000))),
    "an ignored field of small pieces": attack(CHAT, chat(metadata=repeated({}, 10_000_000))),
    "refused frames of many pixels": attack(CHAT, frames(2500, blank_png(64)), num=2),
    "a video of commas": attack(
        CHAT, chat([{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "," * 12_000_000}}])
    ),
    "texts far beyond the context": attack(COMPLETIONS, {"prompt": "the fox sees a river " * 200_000}, num=2),
    "sealed thoughts, Messages": attack(MESSAGES, sealed("messages", 32)),
    "sealed thoughts, Responses": attack(RESPONSES, sealed("responses", 32)),
    "a grammar that is slow to step": attack(CHAT, chat("Go.", guided_grammar=AMBIGUOUS, max_tokens=150)),
    "a regex that grows": attack(CHAT, chat("Go.", guided_regex="(a?){500}a{500}", max_tokens=60)),
    "pipelined, and the client leaves": Attack(
        CHAT,
        CHAT,
        (Shot((request(CHAT, b'{"messages":[{"role":"user","content":"Go."}],"max_tokens":3000,"ignore_eos":true}',
                       ATTACKER) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",), num_answers=0),),
    ),
}  # fmt: skip

NESTED = "((((a{100}){100}){100}){100})"
EMPTY = "(|a)" * 20_000
DOUBLING: Any = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2, "properties": {"a": {}}} for n in range(40)}


def form(schema: Any) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def declared(parameters: Any, **more: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]}


GRAMMARS: dict[str, Any] = {
    "nested counts": {"structured_outputs": {"regex": NESTED}},
    "empty alternatives": {"guided_regex": EMPTY},
    "escapes": {"guided_grammar": 'start: "a"\n' + '\\"' * 60_000},
    "a pattern": form({"type": "string", "pattern": f"^{NESTED}$"}),
    "a strict tool": declared({"properties": {"a": {"type": "string", "pattern": EMPTY}}}, strict=True),
    "joined references": {
        **declared({"$ref": "#/$defs/D0", "properties": {"b": {}}, "$defs": {**DOUBLING, "D40": {}}}),
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
ATTACKS |= {kind: attack(CHAT, chat("Go.", max_tokens=30, **fields)) for kind, fields in GRAMMARS.items()}

USUAL = (
    "a background response that cannot be echoed", "wrong items", "small parts", "refused frames of many pixels",
    "sealed thoughts, Messages", "a grammar that is slow to step", "pipelined, and the client leaves", "nested counts",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(ATTACKS, USUAL))
def test_an_attack_that_once_succeeded_harms_nobody(gate: Gate, name: str) -> None:
    assert gate.faults(ATTACKS[name]) == []


INTEGERS = {
    CHAT: ["max_tokens", "max_completion_tokens", "top_k", "seed", "n", "min_tokens", "thinking_token_budget"],
    COMPLETIONS: ["max_tokens", "top_k", "seed", "n", "best_of", "logprobs"],
    MESSAGES: ["max_tokens", "top_k"],
    RESPONSES: ["max_output_tokens", "top_k", "seed"],
}
BASES: dict[str, Any] = {CHAT: chat(), COMPLETIONS: {"prompt": "Hi"}, MESSAGES: chat(), RESPONSES: response()}
REFUSED: list[tuple[str, Any]] = [
    *((path, {**BASES[path], name: HUGE}) for path, names in INTEGERS.items() for name in names),
    (CHAT, chat(stop_token_ids=[HUGE])),
    (COMPLETIONS, {"prompt": [HUGE]}),
    (MESSAGES, chat(thinking={"type": "enabled", "budget_tokens": HUGE})),
    *((path, {**BASES[path], "model": SURROGATE}) for path in BASES),
    *((path, {**BASES[path], SURROGATE: 1}) for path in BASES),
    (RESPONSES, response(metadata={"k": SURROGATE})),
    (RESPONSES, response(metadata={"k": SURROGATE}, stream=True)),
    (RESPONSES, response(instructions=SURROGATE)),
    (RESPONSES, response(previous_response_id=SURROGATE)),
    (RESPONSES, {"input": [{"type": "item_reference", "id": SURROGATE}]}),
    (RESPONSES, tool("responses", {"type": "object", "properties": {SURROGATE: {"type": "string"}}})),
    (RESPONSES, response(text={"format": {"type": "json_schema", "name": "x", "schema": {"const": SURROGATE}}})),
]
ODD_SCHEMAS: list[Any] = [
    {"type": "object", "properties": 5},
    {"type": "object", "anyOf": [{"properties": [1]}]},
    {"type": "object", "properties": {"a": {"type": "string", "format": ["x"]}}},
    {"type": "object", "properties": {"a": {"$ref": 5}}},
    {"type": "object", "properties": {"a": {"anyOf": [0]}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {
        "a": {"type": ["string", "integer"], "anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}},
]  # fmt: skip
REFUSED += [(CHAT, tool("chat", schema, choice)) for schema in ODD_SCHEMAS for choice in ("strict", "required")]


def test_no_odd_value_is_an_internal_error(gate: Gate) -> None:
    """All at once: none of them is worth a heartbeat of its own."""
    shots = [Shot((request(path, dumps(body), ATTACKER),)) for path, body in REFUSED]
    outcomes = fire(gate.driver.target.port, tuple(shots), 60)
    faults = [
        f"{path} {body}: {fault}"
        for (path, body), outcome in zip(REFUSED, outcomes, strict=True)
        for answer in outcome.answers
        for fault in faults_of_answer(answer, path)
    ]
    assert faults == []
    assert all(outcome.missing is None for outcome in outcomes)
    assert gate.driver.settle() == ()


def test_the_status_stays_short_after_long_errors(gate: Gate) -> None:
    long = "x" * 1_000_000
    bodies = [chat(**{long: 1}), {"messages": [{"role": long, "content": ""}]}, chat(response_format={"type": long})]
    for body in [*bodies, chat(logit_bias={long: 1}), chat(tool_choice=long, tools=[])]:
        fire(gate.driver.target.port, attack(CHAT, body).shots, 60)
    assert len(gate.driver.target.get("/v1/status").content) < 200_000


@pytest.mark.parametrize("seed", cases(range(1, 4), [1]))
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_drawn_attacks_harm_nobody(gate: Gate, document: Document, protocol: str, seed: int) -> None:
    case = Drawing(protocol, document, most_bytes=30_000, is_huge=False).draw(seed)
    assert gate.faults(case.attack) == [], case.repeat
