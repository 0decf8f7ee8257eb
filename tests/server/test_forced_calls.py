"""A call that a request forces comes back under the declared name, whatever its characters, or is refused first."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from tests.support.running import Running
from tests.support.tokenizers import sentencepiece_backend

from .watched import engine_served

PARTS = (
    "e\u0301", "a\u030a\u0323", "\u212b", "\u1100\u1161\u11a8", "가", "ﬁ", "①", "ｆｕｌｌ", "ß", "İ", "Get", "_",
    "-", ".", ":", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "👍🏽", "\u200f", "שָׁלוֹם", "\u202e", "▁", '"',
    "\\", "/", "a b", "&lt;",
)  # fmt: skip
NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}
HI: Any = [{"role": "user", "content": "hi"}]
MOST: Any = {"max_tokens": 300}


def composing(folder: Path) -> str:
    """As Qwen's tokenizers, which compose accents."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(folder / "tokenizer.json"))
    return "<|im_end|>"


def spacing(folder: Path) -> str:
    """As Gemma's tokenizers, which have a token for each byte; the tags of calls are plain text here."""
    backend = sentencepiece_backend()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.save(str(folder / "tokenizer.json"))
    return "</s>"


@pytest.fixture(scope="module", params=[composing, spacing])
def server(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """It writes calls as tags, which cannot carry every name."""
    folder = tmp_path_factory.mktemp("forced") / "checkpoint"
    shutil.copytree(checkpoint("qwen3"), folder)
    eos = request.param(folder)
    eos_id = Backend.from_file(str(folder / "tokenizer.json")).token_to_id(eos)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": [eos_id]}))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": eos, "pad_token": eos}))
    with engine_served(folder, max_model_len=2048, tool_call_parser="qwen3_xml") as running:
        yield running


def chat_tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": NOTHING}}


def call_name(reply: dict[str, Any]) -> Any:
    return [call["function"]["name"] for call in reply["choices"][0]["message"].get("tool_calls") or []]


def drawn_names() -> list[str]:
    """Names without white space at their ends, which the tags of calls cannot carry."""
    draw = random.Random(3)
    names = ("".join(draw.choices(PARTS, k=draw.randint(1, 4))) for _ in range(3))
    return list(dict.fromkeys(names))


def test_a_forced_call_has_the_declared_name(http: httpx.Client) -> None:
    for name in drawn_names():
        named = {"type": "function", "function": {"name": name}}
        body = {"messages": HI, "tools": [chat_tool("other"), chat_tool(name)], "tool_choice": named, **OFF, **MOST}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert call_name(reply.json()) == [name] and reply.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["e\u0301", "<|im_end|>", "▁ a", "\u1100\u1161"])
def test_names_and_values_of_a_schema_come_back_exactly(http: httpx.Client, text: str) -> None:
    schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = http.post("/v1/chat/completions", json={"messages": HI, "response_format": form, **OFF, **MOST}).json()
    assert json.loads(reply["choices"][0]["message"]["content"]) == {text: text}


BAD_NAMES = ("a>b", "map<int>", "\n", " a", "</tool_call>", "x" * 300)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_forces_a_name_that_no_call_can_have(http: httpx.Client, stream: bool) -> None:
    for name in BAD_NAMES:
        body = {"messages": HI, "tools": [chat_tool("fine"), chat_tool(name)], "stream": stream, **OFF, **MOST}
        for choice in ("required", {"type": "function", "function": {"name": name}}):
            reply = http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == "tools[1].function.name" and "Rename it" in error["message"]


def test_another_tool_can_still_be_forced_by_its_name(http: httpx.Client) -> None:
    fine: Any = {"type": "function", "function": {"name": "fine"}}
    body = {"messages": HI, "tools": [chat_tool("fine"), chat_tool("a>b")], "tool_choice": fine, **OFF, **MOST}
    assert call_name(http.post("/v1/chat/completions", json=body).json()) == ["fine"]


def test_messages_and_responses_that_force_such_a_name(http: httpx.Client) -> None:
    tools = [{"name": "fine", "input_schema": NOTHING}, {"name": "a>b", "input_schema": NOTHING, "defer_loading": True}]
    body = {"model": "tiny", "messages": HI, "tools": tools, **MOST}
    for choice in ({"type": "any"}, {"type": "tool", "name": "a>b"}):
        reply = http.post("/v1/messages", json={**body, "tool_choice": choice})
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        assert "`tools[1].name`" in reply.json()["error"]["message"]
    function = {"type": "function", "name": "a>b", "parameters": NOTHING}
    inner = {"type": "namespace", "name": "box", "tools": [function]}
    for tool, param in ((function, "tools[0].name"), (inner, "tools[0].tools[0].name")):
        asked = {"model": "tiny", "input": "hi", "tools": [tool], "tool_choice": "required", **OFF}
        reply = http.post("/v1/responses", json=asked)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.full), True])
def test_such_a_tool_hinders_nothing_where_no_call_is_forced(http: httpx.Client, strict: bool) -> None:
    tools = [chat_tool(name) for name in BAD_NAMES]
    for tool in tools:
        tool["function"]["strict"] = strict
    for given in (tools, [*tools, chat_tool("fine")]):
        reply = http.post("/v1/chat/completions", json={"messages": HI, "tools": given, "max_tokens": 8, **OFF})
        assert reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] == "length"


DIGIT: Any = {"type": "integer", "minimum": 0, "maximum": 9}
INNER: Any = {"type": "object", "properties": {"b": DIGIT}}
OUTER: Any = {"type": "object", "properties": {"a": DIGIT, "o": INNER}, "required": ["o"]}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": OUTER}}


def names_in(arguments: str) -> list[str]:
    found: list[str] = []
    json.loads(arguments, object_pairs_hook=lambda pairs: found.extend(name for name, _ in pairs))
    return found


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "lfm2"])
def test_forced_calls_have_declared_arguments_alone_at_every_depth(
    checkpoint: Callable[..., Path], parser: str
) -> None:
    """As JSON, as tags and as Python calls; a name comes once in the text that the client gets."""
    choice = {"type": "function", "function": {"name": "f"}}
    asked: Any = {"messages": HI, "tools": [TOOL], "tool_choice": choice, **OFF, "max_tokens": 400}
    settings = {"max_model_len": 2048, "tool_call_parser": parser}
    with engine_served(checkpoint("qwen3"), **settings) as running, running.http() as http:
        for seed in range(2):
            reply = http.post("/v1/chat/completions", json={**asked, "seed": seed})
            assert reply.status_code == 200, reply.text
            [call] = reply.json()["choices"][0]["message"]["tool_calls"]
            found = names_in(call["function"]["arguments"])
            assert sorted(found) == sorted({*found} & {"a", "o", "b"}), call
