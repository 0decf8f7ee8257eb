"""The bundled checkpoint behind a socket: its status and figures, its replies, and what only an engine refuses."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running import Running, serving, slowly
from tests.support.shapes import draw_shape
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

from .normal import joined, normalised, shape
from .refusals import Refusal, Wrong, chat, completions, messages, responses
from .streams import ASKED, PATHS, THINKS, TOOLS

Page = dict[str, Any]
_STATUS = ("/v1/status", "/v1/models", "/v1/cache", "/v1/status/history", "/health")
_DRAFTS: dict[str, Any] = {"num_draft_tokens": 3}  # a fixed number never parks, whatever a step takes
_QUESTION = "What is 2 + 3?"
_LIBRARIES = ("llguidance", "mlx", "mlx_lm", "mlx_vlm", "platform", "python", "transformers")
_HIDDEN = ("model_name", "version", "le", *_LIBRARIES)  # labels whose values are the machine's or the build's


def _png() -> str:
    file = io.BytesIO()
    draw_shape("red", "circle", 112).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _shows(url: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is in this image?"}]}]


_SAYS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": _QUESTION}]},
    "completions": {"prompt": "2 + 3 =", "max_tokens": 12},
    "messages": {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 2000},
    "responses": {"input": _QUESTION},
}
_LISTS = "List the files in /tmp."
_CALLS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": _LISTS}], "tools": TOOLS["chat"], "tool_choice": "required"},
    "messages": {"messages": [{"role": "user", "content": _LISTS}], "tools": TOOLS["messages"],
                 "tool_choice": {"type": "any"}},
    "responses": {"input": _LISTS, "tools": TOOLS["responses"], "tool_choice": "required"},
}  # fmt: skip
# What the engine alone finds out.
ENGINE_REFUSES: dict[str, list[Wrong]] = {
    "prompt too long": [*chat(messages=[{"role": "user", "content": "long " * 3000}]),
                        *completions(prompt="long " * 3000),
                        *messages(messages=[{"role": "user", "content": "long " * 3000}]),
                        *responses(input="long " * 3000)],
    "no image there": [*chat(messages=_shows("data:image/png;base64,AAAA")), *chat(messages=_shows("http://")),
                       *chat(messages=_shows("file:///etc/passwd")), *chat(messages=_shows("ftp://a/b.png")),
                       *chat(messages=_shows("http://127.0.0.1:1/a.png")), *chat(messages=_shows("data:image/png,%")),
                       *responses(input=[{"role": "user", "content": [
                           {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]),
                       *messages(messages=[{"role": "user", "content": [{"type": "image", "source": {
                           "type": "base64", "media_type": "image/png", "data": "AAAA"}}]}])],
    "bad grammar": [*chat(guided_regex="("), *chat(guided_grammar="start: nothing"),
                    *chat(response_format={"type": "json_schema", "json_schema": {
                        "name": "s", "schema": {"$ref": "#/nowhere"}}}),
                    *responses(text={"format": {"type": "json_schema", "name": "s",
                                                "schema": {"type": "strange"}}})],
    "unknown token": [*chat(stop_token_ids=[10_000_000]), *chat(logit_bias={"10000000": 1}),
                      *completions(prompt=[10_000_000])],
}  # fmt: skip


@contextmanager
def _demo(**settings: Any) -> Iterator[tuple[Running, httpx.Client]]:
    config = EngineConfig(model="demo", max_model_len=2048, memory_budget_bytes=2 << 30, **_DRAFTS, **settings)
    with serving(start_engine(config)) as running, running.http() as client:
        yield running, client


@cache
def pages() -> Page:
    """All of it from one engine, in this order: its figures depend on what went before."""
    with _demo(max_num_seqs=1, max_queue=0) as (running, client):
        states = {"idle": _state(client)}
        replies = _replies(client)
        refused = dict(_refused(client))
        with slowly(running):
            states["a reply runs"], busy = _while_one_runs(client)
        states["after replies and errors"] = _state(client)
        metrics = client.get("/metrics").text
    return {"replies": replies, "refused": refused | busy, "states": states, "metrics": metrics}


def _state(client: httpx.Client) -> dict[str, dict[str, str]]:
    return {path: shape(client.get(path).json()) for path in _STATUS}


def _replies(client: httpx.Client) -> str:
    parts = []
    for name, protocol, fields in _asked():
        for is_streamed in (True, False):
            usage = {"stream_options": {"include_usage": True}} if is_streamed and protocol == "chat" else {}
            body = {**ASKED[protocol], **fields, **usage, "temperature": 0, "stream": is_streamed,
                    "cache_salt": f"{protocol} {name} {is_streamed}"}  # fmt: skip
            answer = client.post(PATHS[protocol], json=body)
            assert answer.status_code == 200, answer.text
            head = f"=== {name}, {protocol}, {'streamed' if is_streamed else 'complete'}"
            reply = normalised(answer.content)
            parts.append(f"{head}\n{joined(reply) if is_streamed else reply.rstrip()}\n")
    return "\n".join(parts)


def _asked() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for protocol, fields in _SAYS.items():
        yield "a sum", protocol, {**fields, **THINKS.get(protocol, {})}
    for protocol, fields in _CALLS.items():
        yield "a call", protocol, fields
    yield "an image", "chat", {"messages": _shows(_png()), "reasoning_effort": "none"}
    yield "a stop string", "chat", {**_SAYS["chat"], "stop": ["5"], "reasoning_effort": "none"}
    yield "a choice", "chat", {**_SAYS["chat"], "guided_choice": ["four", "five"], "reasoning_effort": "none"}


def _refused(client: httpx.Client) -> Iterator[tuple[str, Refusal]]:
    for fault, wrong in ENGINE_REFUSES.items():
        for number, each in enumerate(wrong, 1):
            yield f"{fault}, {each.protocol} {number}", Refusal.of(each.ask(client))


def _while_one_runs(client: httpx.Client) -> tuple[dict[str, dict[str, str]], dict[str, Refusal]]:
    """The one place is taken, and nobody may wait."""
    body = {"prompt": "hello", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", PATHS["completions"], json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(8):
            next(lines)
        state = _state(client)
        refused = {
            f"queue full, {protocol}": Refusal.of(client.post(PATHS[protocol], json=ASKED[protocol]))
            for protocol in PATHS
        }
        [running] = client.get("/v1/status").json()["requests"]
        client.post(f"/v1/requests/{running['request_id']}/cancel").raise_for_status()
        *_, last = events_of(lines)
    refused["cancelled in its stream"] = _in_stream(last["error"])
    return state, refused


def _in_stream(error: dict[str, Any]) -> Refusal:
    return Refusal(200, {name: value for name, value in error.items() if name != "message"}, error["message"])


def with_keys() -> dict[str, str]:
    """The status that holders of two keys see, each of one reply of the other and its own."""
    config = EngineConfig(model="demo", max_model_len=2048, memory_budget_bytes=2 << 30, text_only=True, **_DRAFTS)
    with serving(start_engine(config), api_keys=("ann", "ben")) as running:
        for key in ("ann", "ben"):
            with running.http(headers={"x-api-key": key}) as client:
                client.post(PATHS["completions"], json={"prompt": "hello", "max_tokens": 3})
                client.post(PATHS["completions"], json={"prompt": 5})
                status = client.get("/v1/status").json()
    return shape(status)


def metric_names() -> dict[str, Any]:
    """Each family: its kind and the labels of its samples, with the values that are ours."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(pages()["metrics"]):
        samples: dict[str, list[str]] = {}
        for sample in family.samples:
            labels = ", ".join(f"{k}={'…' if k in _HIDDEN else v}" for k, v in sorted(sample.labels.items()))
            samples.setdefault(sample.name, [])
            if labels not in samples[sample.name]:
                samples[sample.name].append(labels)
        bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        found[family.name] = {"kind": family.type, "samples": samples, **({"bounds": bounds} if bounds else {})}
    return found


def metric_words() -> dict[str, str]:
    return {family.name: family.documentation for family in text_string_to_metric_families(pages()["metrics"])}
