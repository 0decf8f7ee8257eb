"""How attacks on each protocol are spelled: tools, guides, thoughts, and bodies that are combined with others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support import protocols
from tests.support.protocols import Body

QUESTION = "What is the weather in Paris?"
TOOL = "get_weather"
CHAT, MESSAGES, RESPONSES = (protocols.PROTOCOLS[name] for name in ("chat", "messages", "responses"))


def _chat_tool(schema: Any, choice: str) -> Body:
    function = {"name": TOOL, "parameters": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": "required"} if choice == "required" else {}
    fields = {"tools": [{"type": "function", "function": function}], **chosen}
    return CHAT.body(QUESTION, max_tokens=60, chat_template_kwargs={"enable_thinking": False}, **fields)


def _chat_guide(kind: str, value: Any) -> Body:
    if kind == "response_format":
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
        return CHAT.body(QUESTION, max_tokens=4, response_format=form)
    return CHAT.body(QUESTION, max_tokens=60, **{kind: value})


def _completion_guide(kind: str, value: Any) -> Body:
    return {"prompt": QUESTION, "max_tokens": 60, kind: value}


def _messages_tool(schema: Any, choice: str) -> Body:
    tool = {"name": TOOL, "input_schema": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": {"type": "any"}} if choice == "required" else {}
    return MESSAGES.body(QUESTION, max_tokens=60, tools=[tool], **chosen)


def _messages_guide(kind: str, value: Any) -> Body:
    form = {"type": "json_schema", "schema": value}
    return MESSAGES.body(QUESTION, max_tokens=4, output_config={"format": form})


def _messages_thoughts(word: str, num: int) -> Body:
    blocks = [{"type": "thinking", "thinking": "", "signature": word}] * num
    return MESSAGES.body("Hi", {"role": "assistant", "content": blocks}, "So?", max_tokens=4)


def _response_tool(schema: Any, choice: str) -> Body:
    tool = {"type": "function", "name": TOOL, "parameters": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": "required"} if choice == "required" else {}
    return RESPONSES.body(QUESTION, max_tokens=60, tools=[tool], **chosen)


def _response_guide(kind: str, value: Any) -> Body:
    form = {"type": "json_schema", "name": "x", "schema": value}
    return RESPONSES.body(QUESTION, max_tokens=4, text={"format": form})


def _response_thoughts(word: str, num: int) -> Body:
    items = [{"type": "reasoning", "summary": [], "encrypted_content": word}] * num
    body = RESPONSES.body("Hi", "So?", max_tokens=4)
    return {**body, "input": [body["input"][0], *items, body["input"][1]]}


@dataclass(frozen=True, slots=True)
class Protocol:
    """`say(content, role)` is a small request. What a protocol has no place for is None."""

    name: str
    spoken: protocols.Protocol
    more_paths: tuple[str, ...] = ()
    tool: Callable[[Any, str], Body] | None = None
    guide: Callable[[str, Any], Body] | None = None
    guides: tuple[str, ...] = ()
    thoughts: Callable[[str, int], Body] | None = None
    others: tuple[Body, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.spoken.path, *self.more_paths)

    @property
    def list_name(self) -> str:
        return self.spoken.list_name

    def text(self, text: str) -> Body:
        return self.spoken.text_part(text)

    def say(self, content: Any, role: str = "user") -> Body:
        return self.spoken.body({"role": role, "content": content}, max_tokens=4)

    def image(self, url: str) -> Body:
        """A request that shows an image, in a protocol that takes images."""
        return self.say([self.spoken.image_part(url), self.text(QUESTION)])

    def conversation(self, num_bytes: int) -> Body:
        """A benign request of about this size: many messages of prose."""
        piece = ("The fox sees a river and the hill behind it. " * max(45, num_bytes // 200_000))[: max(20, num_bytes)]
        num = max(1, num_bytes // (len(piece) + 40))
        if self.name == "completions":
            return self.say(piece * num)
        turns = [self.say(piece, role)[self.list_name][0] for role in ("user", "assistant")]
        return {**self.say("x"), self.list_name: [turns[at % 2] for at in range(num - 1)] + [turns[0]]}


_GUIDED = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")

PROTOCOLS: dict[str, Protocol] = {
    "chat": Protocol(
        name="chat",
        spoken=CHAT,
        tool=_chat_tool,
        guide=_chat_guide,
        guides=_GUIDED,
        others=({"stream": True}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stream": True, "n": 3}),
    ),
    "completions": Protocol(
        name="completions",
        spoken=protocols.PROTOCOLS["completions"],
        guide=_completion_guide,
        guides=_GUIDED,
        others=({"stream": True}, {"n": 2}, {"logprobs": 2}, {"echo": True}),
    ),
    "messages": Protocol(
        name="messages",
        spoken=MESSAGES,
        more_paths=("/v1/messages/count_tokens",),
        tool=_messages_tool,
        guide=_messages_guide,
        guides=("response_format",),
        thoughts=_messages_thoughts,
        others=({"stream": True}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ),
    "responses": Protocol(
        name="responses",
        spoken=RESPONSES,
        tool=_response_tool,
        guide=_response_guide,
        guides=("response_format",),
        thoughts=_response_thoughts,
        others=({"stream": True}, {"background": True}, {"store": False}, {"metadata": {"a": "b"}}),
    ),
}  # fmt: skip
