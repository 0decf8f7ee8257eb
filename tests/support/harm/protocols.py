"""How each protocol spells a request: its paths, and where texts, tools, guides, images and thoughts stand in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
QUESTION = "What is the weather in Paris?"
TOOL = "get_weather"


def _chat(content: Any, role: str = "user") -> Body:
    return {"messages": [{"role": role, "content": content}], "max_tokens": 4}


def _chat_tool(schema: Any, choice: str) -> Body:
    function = {"name": TOOL, "parameters": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": "required"} if choice == "required" else {}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {
        **_chat(QUESTION),
        **chosen,
        **thinking,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": function}],
    }


def _chat_guide(kind: str, value: Any) -> Body:
    if kind == "response_format":
        return {**_chat(QUESTION), kind: {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}
    return {**_chat(QUESTION), "max_tokens": 60, kind: value}


def _completion(content: Any, role: str = "user") -> Body:
    return {"prompt": content, "max_tokens": 4}


def _completion_guide(kind: str, value: Any) -> Body:
    return {"prompt": QUESTION, "max_tokens": 60, kind: value}


def _messages_tool(schema: Any, choice: str) -> Body:
    tool = {"name": TOOL, "input_schema": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": {"type": "any"}} if choice == "required" else {}
    return {**_chat(QUESTION), **chosen, "max_tokens": 60, "tools": [tool]}


def _messages_guide(kind: str, value: Any) -> Body:
    return {**_chat(QUESTION), "output_config": {"format": {"type": "json_schema", "schema": value}}}


def _messages_image(source: Any) -> Body:
    data = str(source).rpartition("base64,")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return _chat([block, {"type": "text", "text": QUESTION}])


def _messages_thoughts(word: str, num: int) -> Body:
    blocks = [{"type": "thinking", "thinking": "", "signature": word}] * num
    return {"messages": [*_chat("Hi")["messages"], {"role": "assistant", "content": blocks}, *_chat("So?")["messages"]],
            "max_tokens": 4}  # fmt: skip


def _response(content: Any, role: str = "user") -> Body:
    return {"input": [{"role": role, "content": content}], "max_output_tokens": 4}


def _response_tool(schema: Any, choice: str) -> Body:
    tool = {"type": "function", "name": TOOL, "parameters": schema, "strict": choice == "strict"}
    chosen = {"tool_choice": "required"} if choice == "required" else {}
    return {**_response(QUESTION), **chosen, "max_output_tokens": 60, "tools": [tool]}


def _response_guide(kind: str, value: Any) -> Body:
    return {**_response(QUESTION), "text": {"format": {"type": "json_schema", "name": "x", "schema": value}}}


def _response_thoughts(word: str, num: int) -> Body:
    items = [{"type": "reasoning", "summary": [], "encrypted_content": word}] * num
    return {"input": [*_response("Hi")["input"], *items, *_response("So?")["input"]], "max_output_tokens": 4}


@dataclass(frozen=True, slots=True)
class Protocol:
    """`say(content, role)` is a small request. What a protocol has no place for is None."""

    name: str
    paths: tuple[str, ...]
    say: Callable[..., Body]
    list_name: str  # of the conversation, or of the prompts
    text: Callable[[str], Any] = lambda text: {"type": "text", "text": text}
    tool: Callable[[Any, str], Body] | None = None
    guide: Callable[[str, Any], Body] | None = None
    guides: tuple[str, ...] = ()
    image: Callable[[str], Body] | None = None
    thoughts: Callable[[str, int], Body] | None = None
    others: tuple[Body, ...] = field(default=())  # bodies that are combined with others

    def conversation(self, num_bytes: int) -> Body:
        """A benign request of about this size: many messages of prose."""
        piece = ("The fox sees a river and the hill behind it. " * max(45, num_bytes // 200_000))[: max(20, num_bytes)]
        num = max(1, num_bytes // (len(piece) + 40))
        if self.name == "completions":
            return self.say(piece * num)
        turns = [self.say(piece, role)[self.list_name][0] for role in ("user", "assistant")]
        return {**self.say("x"), self.list_name: [turns[at % 2] for at in range(num - 1)] + [turns[0]]}


_PICTURE = "image_url"
_GUIDED = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")

PROTOCOLS: dict[str, Protocol] = {
    "chat": Protocol(
        name="chat",
        paths=("/v1/chat/completions",),
        say=_chat,
        list_name="messages",
        tool=_chat_tool,
        guide=_chat_guide,
        guides=_GUIDED,
        image=lambda url: _chat([{"type": _PICTURE, _PICTURE: {"url": url}}, {"type": "text", "text": QUESTION}]),
        others=({"stream": True}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stream": True, "n": 3}),
    ),
    "completions": Protocol(
        name="completions",
        paths=("/v1/completions",),
        say=_completion,
        list_name="prompt",
        guide=_completion_guide,
        guides=_GUIDED,
        others=({"stream": True}, {"n": 2}, {"logprobs": 2}, {"echo": True}),
    ),
    "messages": Protocol(
        name="messages",
        paths=("/v1/messages", "/v1/messages/count_tokens"),
        say=_chat,
        list_name="messages",
        tool=_messages_tool,
        guide=_messages_guide,
        guides=("response_format",),
        image=_messages_image,
        thoughts=_messages_thoughts,
        others=({"stream": True}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ),
    "responses": Protocol(
        name="responses",
        paths=("/v1/responses",),
        say=_response,
        list_name="input",
        text=lambda text: {"type": "input_text", "text": text},
        tool=_response_tool,
        guide=_response_guide,
        guides=("response_format",),
        image=lambda url: _response([{"type": "input_image", "image_url": url}]),
        thoughts=_response_thoughts,
        others=({"stream": True}, {"background": True}, {"store": False}, {"metadata": {"a": "b"}}),
    ),
}  # fmt: skip
