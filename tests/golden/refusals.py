"""Wrong requests, and what clients read of each refusal; a few faults are forgiven. The engine follows a script."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.running import Running, serving
from vllm_mlx.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineDead,
    GenerationError,
    GrammarLimit,
    InvalidDocument,
    InvalidImage,
    InvalidVideo,
    Overloaded,
    TemplateError,
    TimeLimit,
    TooManyRequests,
    VLLMMLXError,
)
from vllm_mlx.core.request import RequestLimits

from ..server.fakes import FakeEngine
from .normal import normalised
from .streams import ASKED, PATHS, TOOLS

PROTOCOLS = tuple(PATHS)
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A request of one protocol that is refused. `content`: its body where that is no JSON."""

    protocol: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def ask(self, client: httpx.Client) -> httpx.Response:
        body = {name: value for name, value in ASKED[self.protocol].items() if name not in self.without}
        content = json.dumps(body | dict(self.fields)).encode() if self.content is None else self.content
        return client.post(PATHS[self.protocol], content=content, headers=dict(self.headers))


@dataclass(frozen=True)
class Refusal:
    """What must stay, and the words that may change."""

    status: int
    envelope: Mapping[str, Any]
    message: str

    @classmethod
    def of(cls, answer: httpx.Response) -> "Refusal":
        if answer.status_code == 200:
            return cls(answer.status_code, {"accepted": True}, "")
        body = answer.json()
        error = body["error"]
        others = {name: value for name, value in body.items() if name not in ("error", "request_id")}
        rest = {name: value for name, value in error.items() if name != "message"}
        if "retry-after" in answer.headers:
            others["retry-after"] = "given"
        return cls(answer.status_code, {**others, **rest}, normalised(error["message"].encode()))


def everywhere(**options: Any) -> Iterator[Wrong]:
    """The same fault in each protocol."""
    for protocol in PROTOCOLS:
        yield Wrong(protocol=protocol, **options)


def chat(**fields: Any) -> list[Wrong]:
    return [Wrong(protocol="chat", fields=fields)]


def completions(**fields: Any) -> list[Wrong]:
    return [Wrong(protocol="completions", fields=fields)]


def messages(**fields: Any) -> list[Wrong]:
    return [Wrong(protocol="messages", fields=fields)]


def responses(**fields: Any) -> list[Wrong]:
    return [Wrong(protocol="responses", fields=fields)]


def _user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "strange"}}}
_TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": []}
_CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
_AUDIO_PART = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
_FILE_URL = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}

# Refused before any engine is asked.
BEFORE: dict[str, list[Wrong]] = {
    "not JSON": list(everywhere(content=b"{bad")),
    "JSON of another kind": list(everywhere(content=b"[1]")),
    "empty body": list(everywhere(content=b"")),
    "not UTF-8": list(everywhere(content=b'{"model": "\xff"}')),
    "number too long": list(everywhere(content=b'{"x":1' + b"0" * 5000 + b"}")),
    "nested too deep": list(everywhere(content=b'{"model":"tiny","x":' + b"[" * 300 + b"]" * 300 + b"}")),
    "no content type": list(everywhere(headers={})),
    "wrong content type": list(everywhere(headers={"content-type": "text/plain"})),
    "compressed": list(everywhere(content=b"\x1f\x8b\x08", headers={**JSON, "content-encoding": "gzip"})),
    "unknown model": list(everywhere(fields={"model": "other"})),
    "unknown field": list(everywhere(fields={"surprise": 1})),
    "unsupported field": [*chat(audio={}), *chat(functions=[]), *completions(audio={}), *responses(prompt={}),
                          *messages(mcp_servers=[{"name": "x"}]), *messages(container="x")],
    "unsupported value": [*chat(store=True), *chat(service_tier="flex"), *chat(verbosity="low"),
                          *responses(truncation="auto"), *responses(service_tier="flex")],
    "wrong type": [*everywhere(fields={"temperature": "hot"}), *everywhere(fields={"stream": "yes"}),
                   *everywhere(fields={"model": 5})],
    "float for integer": [*chat(n=1.0), *completions(max_tokens=1.5), *messages(max_tokens=1.5),
                          *responses(max_output_tokens=1.5)],
    "out of range": [*everywhere(fields={"temperature": -1}), *everywhere(fields={"top_p": 2}),
                     *everywhere(fields={"top_k": -2}), *chat(max_tokens=0), *completions(max_tokens=0),
                     *messages(max_tokens=0), *responses(max_output_tokens=0), *chat(n=0), *chat(min_p=2),
                     *chat(presence_penalty=3), *chat(repetition_penalty=0), *chat(seed=-1), *chat(min_tokens=-1),
                     *chat(top_logprobs=50, logprobs=True), *completions(logprobs=50)],
    "contradiction": [*chat(top_logprobs=2), *chat(min_tokens=9, max_tokens=5),
                      *chat(stream_options={"include_usage": True}), *completions(best_of=3),
                      *chat(response_format={"type": "json_object"}, guided_regex="a")],
    "field missing": [Wrong(protocol="chat", without=("messages",)), Wrong(protocol="completions", without=("prompt",)),
                      Wrong(protocol="messages", without=("messages",)), Wrong(protocol="responses",
                                                                               without=("input",)),
                      Wrong(protocol="messages", without=("max_tokens",))],
    "no messages": [*chat(messages=[]), *messages(messages=[]), *completions(prompt=[]), *responses(input=[])],
    "unknown role": [*chat(messages=[{"role": "x", "content": "a"}]), *messages(messages=[{"role": "x"}]),
                     *responses(input=[{"role": "x", "content": "a"}])],
    "unknown part": [*chat(messages=_user({"type": "x"})), *messages(messages=_user({"type": "x"})),
                     *responses(input=_user({"type": "x"})), *chat(messages=_user(_AUDIO_PART)),
                     *responses(input=[{"type": "x"}])],
    "call without result": [
        *chat(messages=[{"role": "assistant", "tool_calls": [_CALL]}, {"role": "user", "content": "a"}]),
        *chat(messages=[{"role": "tool", "tool_call_id": "nobody", "content": "a"}]),
        *messages(messages=_user({"type": "tool_result", "tool_use_id": "nobody", "content": "a"})),
        *responses(input=[{"type": "function_call_output", "call_id": "nobody", "output": "a"}])],
    "arguments not JSON": [
        *chat(messages=[{"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "ls", "arguments": "{"}}]},
                        {"role": "tool", "tool_call_id": "c", "content": "a"}])],
    "bad tools": [*chat(tools=[{"type": "x"}]), *chat(tools=[{"type": "function", "function": {"name": ""}}]),
                  *chat(tools="x"), *messages(tools=[{"input_schema": {}}]), *messages(tools="x"),
                  *messages(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
                  *messages(tools=[*TOOLS["messages"], {"type": "web_search_20250305", "name": "search"}]),
                  *responses(tools=[{"type": "function"}]), *responses(tools=[{"type": "image_generation"}]),
                  *chat(tools=TOOLS["chat"] * 2)],
    "bad tool choice": [*chat(tool_choice="x", tools=TOOLS["chat"]), *chat(tool_choice="required"),
                        *chat(tool_choice={"type": "function", "function": {"name": "x"}}, tools=TOOLS["chat"]),
                        *messages(tool_choice={"type": "x"}, tools=TOOLS["messages"]),
                        *messages(tool_choice={"type": "any"}),
                        *messages(tool_choice={"type": "tool", "name": "x"}, tools=TOOLS["messages"]),
                        *responses(tool_choice="x"), *responses(tool_choice={"type": "x"}),
                        *responses(tool_choice={"type": "function", "name": "x"}, tools=TOOLS["responses"])],
    "bad format": [*chat(response_format={"type": "x"}), *chat(response_format={"type": "json_schema"}),
                   *chat(response_format=_SCHEMA), *chat(response_format=_TAG), *chat(structured_outputs={"x": 1}),
                   *chat(structured_outputs={"json": {}, "regex": "a"}), *chat(guided_choice=[]),
                   *chat(guided_json="{"), *messages(output_config={"format": {"type": "x"}}),
                   *responses(text={"format": {"type": "x"}}), *responses(text={"verbosity": "low"}),
                   *chat(response_format={**_SCHEMA, "mode": 1}),
                   *chat(response_format={"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}),
                   *chat(response_format={"type": "text", "json_schema": {"schema": {}}}),
                   *responses(text={"format": {"type": "json_schema", "schema": {}, "mode": 1}}),
                   *chat(tools=[{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark"}}])],
    "bad logit bias": [*chat(logit_bias={"x": 1}), *chat(logit_bias={"1": 101}),
                       *chat(logit_bias={str(number): 1 for number in range(301)})],
    "bad stop": [*chat(stop=["a"] * 65), *chat(stop="a" * 1001), *chat(stop=[""]), *completions(stop=5),
                 *messages(stop_sequences=["a"] * 65), *chat(stop_token_ids=["x"])],
    "bad reasoning": [*chat(reasoning_effort="x"), *messages(thinking={"type": "enabled"}),
                      *messages(thinking={"type": "enabled", "budget_tokens": 99}),
                      *responses(reasoning={"effort": "x"}), *responses(reasoning={"summary": "x"}),
                      *chat(thinking_token_budget=-5), *chat(thinking_token_budget="x"),
                      *chat(chat_template_kwargs={"messages": []}), *chat(chat_template_kwargs={"enable_thinking": 5}),
                      *chat(separate_reasoning=False, stream=True, include_reasoning=False)],
    "bad image": [*chat(messages=_user({"type": "image_url"})),
                  *messages(messages=_user({"type": "image", "source": {"type": "x"}})),
                  *messages(messages=_user({"type": "document", "source": {"type": "text", "data": "x"},
                                            "citations": {"enabled": True}})),
                  *messages(messages=_user({"type": "document", "source": {"type": "file", "file_id": "x"}})),
                  *chat(messages=_user({"type": "file", "file": {"file_id": "x"}})),
                  *responses(input=_user({"type": "input_file", "file_id": "x"})),
                  *responses(input=_user({"type": "input_image"})),
                  *responses(input=_user({"type": "input_image", "file_id": "x"})),
                  *responses(input=_user({"type": "input_file"})),
                  *responses(input=_user({"type": "input_file", "file_data": "", "file_url": "http://x"})),
                  *chat(messages=_user({"type": "file", "file": {"filename": "a.pdf"}}))],
    "unknown response": [*responses(previous_response_id="resp_x"),
                         *responses(input=[{"type": "item_reference", "id": "x"}])],
    "background": [*responses(background=True, store=False), *responses(background=True, stream=True)],
    "unknown include": [*responses(include=["x"])],
    "cache salt": list(everywhere(fields={"cache_salt": "a" * 2000})),
    "continuing": [*chat(continue_final_message=True), *chat(add_generation_prompt=False)],
}  # fmt: skip

# What the engine refuses, or fails with before the first event: told in each protocol.
FROM_ENGINE: dict[str, VLLMMLXError] = {
    "prompt too long": ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512),
    "prompt far too long": ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512, is_least=True),
    "template": TemplateError("The template refuses."),
    "image": InvalidImage("No image."),
    "video": InvalidVideo("No video."),
    "document": InvalidDocument("No document."),
    "time limit": TimeLimit("Too slow."),
    "overloaded": Overloaded("Busy.", retry_after_s=3),
    "queue full": TooManyRequests("Full.", retry_after_s=3),
    "failed": GenerationError("Broken."),
    "cancelled": Cancelled(),
    "grammar limit": GrammarLimit("Too large.", param="tools"),
    "dead": EngineDead("It has ended."),
}

# What HTTP itself refuses: method, path, body.
PLAIN: dict[str, tuple[str, str]] = {
    "unknown path": ("GET", "/v2/chat"),
    "unknown path of Messages": ("GET", "/v1/messages/x/y"),
    "slip in the base URL": ("POST", "/v1/v1/messages"),
    "wrong method": ("GET", "/v1/chat/completions"),
    "wrong method of Messages": ("GET", "/v1/messages"),
    "unknown model": ("GET", "/v1/models/other"),
    "unknown response": ("GET", "/v1/responses/resp_x"),
    "deleting an unknown response": ("DELETE", "/v1/responses/resp_x"),
    "cancelling an unknown response": ("POST", "/v1/responses/resp_x/cancel"),
    "items of an unknown response": ("GET", "/v1/responses/resp_x/input_items"),
    "too many items": ("GET", "/v1/responses/resp_x/input_items?limit=1000"),
    "streaming a stored response": ("GET", "/v1/responses/resp_x?stream=true"),
    "status interval": ("GET", "/v1/status/stream?interval=0"),
}


def refusals() -> dict[str, Refusal]:
    """By name: the fault, its protocol, and a number where one fault comes in several ways."""
    return {
        name: refusal
        for asked in (_before, _from_engine, _limited, _guarded, _ended, _plain)
        for name, refusal in asked()
    }


def _named(fault: str, refused: list[tuple[str, Refusal]]) -> Iterator[tuple[str, Refusal]]:
    counts: dict[str, int] = {}
    for protocol, refusal in refused:
        counts[protocol] = number = counts.get(protocol, 0) + 1
        yield f"{fault}, {protocol}{f' {number}' if number > 1 else ''}", refusal


@contextmanager
def _client(engine: FakeEngine | None = None, **settings: Any) -> Iterator[tuple[Running, httpx.Client]]:
    with serving(engine or FakeEngine(), **settings) as running, running.http() as client:
        yield running, client


def _asked(client: httpx.Client, fault: str, wrong: Iterable[Wrong]) -> Iterator[tuple[str, Refusal]]:
    return _named(fault, [(each.protocol, Refusal.of(each.ask(client))) for each in wrong])


def _before() -> Iterator[tuple[str, Refusal]]:
    with _client() as (_, client):
        for fault, wrong in BEFORE.items():
            yield from _asked(client, fault, wrong)


def _from_engine() -> Iterator[tuple[str, Refusal]]:
    engine = FakeEngine()
    with _client(engine) as (_, client):
        for fault, error in FROM_ENGINE.items():
            engine.refuse = error
            yield from _asked(client, f"engine: {fault}", everywhere())


def _limited() -> Iterator[tuple[str, Refusal]]:
    limits = RequestLimits(max_messages=2, max_tools=1, max_schema_bytes=100, max_choices=2)
    long = {"type": "object", "properties": {"x": {"enum": ["y" * 300]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    several = {"role": "user", "content": "a"}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": long}}
    cases = {
        "too many messages": [*chat(messages=[several] * 3), *messages(messages=[several] * 3),
                              *responses(input=[several] * 3)],
        "too many tools": [*chat(tools=[*TOOLS["chat"], tool]),
                           *messages(tools=[*TOOLS["messages"], {"name": "f", "input_schema": long}]),
                           *responses(tools=[*TOOLS["responses"], {"type": "function", "name": "f"}])],
        "schema too long": [*chat(tools=[tool]), *chat(response_format=schema),
                            *messages(tools=[{"name": "f", "input_schema": long}])],
        "too many choices": [*chat(n=3), *completions(prompt=["a", "b", "c"])],
        "body too large": list(everywhere(fields={"x": "y" * 5000})),
    }  # fmt: skip
    with _client(limits=limits, max_body_bytes=4000) as (_, client):
        for fault, wrong in cases.items():
            yield from _asked(client, fault, wrong)


def _guarded() -> Iterator[tuple[str, Refusal]]:
    with _client(api_keys=("right",), max_requests_per_minute=1) as (_, client):
        yield from _asked(client, "no key", everywhere())
        yield from _asked(client, "wrong key", everywhere(headers={**JSON, "x-api-key": "wrong"}))
        right = [*everywhere(headers={**JSON, "authorization": "Bearer right"})]
        right[0].ask(client)
        yield from _asked(client, "too often", right)
    with _client() as (_, client):
        yield from _asked(client, "host", everywhere(headers={**JSON, "host": "evil.example"}))


def _ended() -> Iterator[tuple[str, Refusal]]:
    stopping = FakeEngine()
    with _client(stopping) as (_, client):
        stopping.shutdowns.append(0.0)
        yield from _asked(client, "shutting down", everywhere())


def _plain() -> Iterator[tuple[str, Refusal]]:
    with _client() as (_, client):
        for fault, (method, path) in PLAIN.items():
            yield fault, Refusal.of(client.request(method, path, json={} if method == "POST" else None))
