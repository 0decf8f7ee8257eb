"""A conversation and what the cache gives it, schemas and tools, and drafts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.served import Server, serving

from .checkpoints import checkpoint
from .sources import SMOLLM2, Source

QUESTIONS = (
    "What is the capital of France?", "Which river flows through it?", "Name a museum there.",
    "Who painted the Mona Lisa?", "When did he live?", "What else did he do?", "What is 12 + 30?",
    "Name three colours.", "Which of them is the sky's?", "Why is the sky blue?", "Say hello in German.",
    "What was my first question?",
)  # fmt: skip
_TURN_REPLY = 40
_MISSING = 16  # tokens of a known beginning that a template may close differently


@dataclass(slots=True)
class Conversation:
    """A chat, or for a model without a template one text that goes on."""

    is_chat: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = "A conversation between a curious person and an expert who answers in one sentence.\n"

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        self.text += f"\nQuestion: {question}\nAnswer:"

    def hear(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})
        self.text += reply

    def send(self, server: Server, **fields: Any) -> tuple[str, dict[str, Any]]:
        body = {"max_tokens": _TURN_REPLY, "temperature": 0, **fields}
        if self.is_chat:
            found = server.post("/v1/chat/completions", {**body, "messages": self.messages})
            return found["choices"][0]["message"]["content"], found["usage"]
        found = server.post("/v1/completions", {**body, "prompt": self.text, "stop": ["\n"]})
        return found["choices"][0]["text"], found["usage"]


def check_conversation(source: Source, form: str) -> tuple[bool, list[str]]:
    conversation = Conversation(is_chat=source == SMOLLM2)
    prompt, known, cached, missing, reply = 0, 0, 0, 0, ""
    first_reply = ""
    with serving(None, str(checkpoint(source, form))) as server:
        for question in QUESTIONS:
            conversation.ask(question)
            reply, usage = conversation.send(server)
            found = usage["prompt_tokens_details"]["cached_tokens"]
            missing = max(missing, known - found)
            prompt, cached = prompt + usage["prompt_tokens"], cached + found
            known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            first_reply = first_reply or reply
            if question != QUESTIONS[-1]:
                conversation.hear(reply)
        again, usage = conversation.send(server, cache_salt="another")
    is_cold = usage["prompt_tokens_details"]["cached_tokens"] == 0
    is_equal = again == reply or form != "float32"
    is_right = missing <= _MISSING and is_cold and is_equal and "Paris" in first_reply
    return is_right, [
        f"twelve turns: {cached} of {prompt} prompt tokens were cached ({cached / prompt:.1%}); of what the turn "
        f"before left, at most {max(missing, 0)} tokens were computed again",
        f"the last reply without the cache: {'equal' if again == reply else f'{again!r} instead of {reply!r}'}",
        f"the first reply: {first_reply!r}",
    ]


_SHOWS_TOOLS = Path(__file__).parents[2] / "tests/templates/qwen3.jinja"  # in the markers that SmolLM2 knows
_FACT = "Paris is the capital of France."
_EXAMPLE = [
    {"role": "user", "content": "Berlin is the capital of Germany."},
    {"role": "assistant", "content": '{"country": "Germany", "capital": "Berlin"}'},
]
_SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_NAME, _TEXT = "get_weather", "The weather in a city"
_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
_FUNCTION = {"name": _NAME, "description": _TEXT, "parameters": _CITY}
_TOOL_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _WEATHER, "tools": [{"type": "function", "function": _FUNCTION}]},
    "/v1/messages": {
        "messages": _WEATHER,
        "tools": [{"name": _NAME, "description": _TEXT, "input_schema": _CITY}],
        "max_tokens": 64,
    },
    "/v1/responses": {"input": _WEATHER, "tools": [{"type": "function", **_FUNCTION}]},
}
Finding = tuple[str, bool, str]


def check_content(source: Source, form: str) -> tuple[bool, list[str]]:
    folder = checkpoint(source, form)
    with serving(None, str(folder)) as server:
        found = list(_chat(server) if source == SMOLLM2 else _completions(server))
    if source == SMOLLM2:
        template = ("--chat-template", str(_SHOWS_TOOLS), "--tool-call-parser", "hermes")
        with serving(None, str(folder), *template) as server:
            found.append(_forced_call(server))
    lines = [f"{name}: {'' if is_right else 'WRONG, '}{text}" for name, is_right, text in found]
    return all(is_right for _, is_right, _ in found), lines


def _chat(server: Server) -> Iterator[Finding]:
    body: dict[str, Any] = {"messages": [*_EXAMPLE, {"role": "user", "content": _FACT}]}
    format = {"type": "json_schema", "json_schema": {"name": "fact", "schema": _SCHEMA, "strict": True}}
    found = server.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 60, "response_format": format})
    text = found["choices"][0]["message"]["content"]
    yield "JSON schema", _is_fact(text), text
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    choices = [f"The capital of France is {city}." for city in ("Berlin", "Madrid", "Paris", "Rome")]
    text = server.post("/v1/chat/completions", {**body, "guided_choice": choices})["choices"][0]["message"]["content"]
    yield "choice", text == choices[2], text
    for path, body in _TOOL_REQUESTS.items():
        answer = server.answer(path, body)
        text = answer.json()["error"]["message"] if answer.is_client_error else answer.text
        yield f"tools, {path}", answer.status_code == 400 and "tools" in text, text


def _completions(server: Server) -> Iterator[Finding]:
    body: dict[str, Any] = {
        "prompt": "\n".join([*(turn["content"] for turn in _EXAMPLE), _FACT, ""]),
        "temperature": 0,
        "max_tokens": 60,
    }
    text = server.post("/v1/completions", {**body, "guided_json": _SCHEMA})["choices"][0]["text"]
    yield "JSON schema", _is_fact(text), text
    body = {"prompt": "The capital of Germany is", "temperature": 0}
    choices = [" Paris", " Madrid", " Berlin", " Rome"]
    text = server.post("/v1/completions", {**body, "guided_choice": choices})["choices"][0]["text"]
    yield "choice", text == " Berlin", text
    answer = server.answer("/v1/chat/completions", {"messages": _WEATHER})
    yield "a chat without a template", answer.status_code == 400, answer.json()["error"]["message"]


def _forced_call(server: Server) -> Finding:
    body = _TOOL_REQUESTS["/v1/chat/completions"]
    body = {**body, "tool_choice": "required", "temperature": 0, "max_tokens": 100}
    [call] = server.post("/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    text = str(call["function"]["arguments"])
    is_right = call["function"]["name"] == _NAME and "Paris" in str(json.loads(text).get("city"))
    return "forced call, by a template that shows tools", is_right, f"{call['function']['name']} {text}"


def _is_fact(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["country", "capital"] and "France" in found["country"] and "Paris" in found["capital"]


_FILE = "\n".join(f"def area_{name}(width, height):\n    return width * height\n" for name in ("door", "wall", "roof"))
_LOOP = "\n".join(json.dumps({"tool": "read", "path": f"src/file_{number}.py"}) for number in range(4))
# A prompt, and the kind of text with which the model goes on.
TEXTS = {
    "editing a file": f"The file:\n{_FILE}\nThe same file with `size_` in place of `area_`:\n",
    "prose": "A short story about a lighthouse keeper who found a letter in a bottle.\n\nOne morning",
    "a loop of tools": f"The calls of an agent, one a line:\n{_LOOP}\n",
}
_DRAFTED_REPLY = 96
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1, "seed": 11})


def check_drafts(source: Source, form: str) -> tuple[bool, list[str]]:
    path, lines, is_right = checkpoint(source, form), [], True
    with serving(None, str(path), "--num-draft-tokens", "0") as server:
        plain = {kind: [_drafted(server, text, **settings) for settings in SETTINGS] for kind, text in TEXTS.items()}
    for wanted in ("7", "auto"):
        with serving(None, str(path), "--num-draft-tokens", wanted) as server:
            for kind, text in TEXTS.items():
                before = _counts(server)
                replies = [_drafted(server, text, **settings) for settings in SETTINGS]
                drafted, accepted, rows = (now - old for now, old in zip(_counts(server), before, strict=True))
                num_equal = sum(own == other for own, other in zip(replies, plain[kind], strict=True))
                is_right &= num_equal == len(SETTINGS) or form != "float32"
                gain = f"{1 + accepted / rows:.1f} tokens in a pass with drafts" if rows else "no drafts"
                lines.append(
                    f"--num-draft-tokens {wanted}, {kind}: {num_equal} of {len(SETTINGS)} replies are equal; "
                    f"{accepted} of {drafted} drafts accepted, {gain}"
                )
            parked = server.status()["drafts"]["parked"]
            lines.append(
                f"--num-draft-tokens {wanted}: " + (f"parked: {parked}" if parked else "not parked at the end")
            )
    return is_right, lines


def _drafted(server: Server, text: str, **settings: Any) -> str:
    body = {"prompt": text, "max_tokens": _DRAFTED_REPLY, "ignore_eos": True, **settings}
    reply: str = server.post("/v1/completions", body)["choices"][0]["text"]
    return reply


def _counts(server: Server) -> tuple[int, int, int]:
    """Drafted and accepted tokens, and how often a row had drafts, since the start."""
    drafts = server.status()["drafts"]
    return sum(drafts["drafted_tokens"].values()), sum(drafts["accepted_tokens"].values()), drafts["num_drafts"]
