"""The four protocols: how each writes a request, and how a client reads a reply, an event of a stream, and an error."""

from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

Body = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """Tokens, by the usage of a reply."""

    prompt: int
    cached: int
    completion: int


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


class Protocol:
    """What most protocols share: a list of messages with roles, and OpenAI's envelope."""

    path: ClassVar[str]
    list_name: ClassVar[str] = "messages"
    limit: ClassVar[str] = "max_tokens"
    hides_reasoning: ClassVar[Body] = {}  # fields of a request whose client sees no reasoning
    image_place: ClassVar[str] = ""  # of an image that is the first part of a request

    def body(self, *messages: Any, max_tokens: int = 8, **fields: Any) -> Body:
        """A request. A message that is no object is the content of one from the user."""
        said = [each if _is_message(each) else {"role": "user", "content": each} for each in messages]
        return {self.list_name: said, self.limit: max_tokens, **fields}

    def text_part(self, text: str) -> Body:
        return {"type": "text", "text": text}

    def image_part(self, url: str) -> Body:
        return {"type": "image_url", "image_url": {"url": url}}

    def content(self, reply: Any) -> Any:
        """All that a reply says, which is the same for the same request."""
        return reply["choices"]

    def text(self, reply: Any) -> str:
        return str(reply["choices"][0]["message"]["content"])

    def end(self, reply: Any) -> str:
        return str(reply["choices"][0]["finish_reason"])

    def counts(self, reply: Any) -> Counts:
        usage = reply["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])

    def event_text(self, event: Any) -> str:
        return event["choices"][0]["delta"].get("content") or ""

    def is_sign_of_life(self, event: Any) -> bool:
        """Whether the event only keeps the connection alive."""
        choice = event["choices"][0]
        return (choice["delta"], choice["finish_reason"]) == ({}, None)

    def error(self, told: Any) -> Body:
        """The error of a refusal, or of the last event of a stream."""
        error: Body = told["error"]
        return error

    def refusal(self, answer: httpx.Response) -> Body:
        """The error of an invalid request, in the protocol's own envelope."""
        assert answer.status_code == 400, answer.text
        error = self.error(answer.json())
        assert error["type"] == "invalid_request_error"
        return error


class Chat(Protocol):
    path = "/v1/chat/completions"
    hides_reasoning: ClassVar[Body] = {"include_reasoning": False}
    image_place = "messages[0].content[0].image_url"


class Completions(Protocol):
    path = "/v1/completions"
    list_name = "prompt"

    def body(self, *messages: Any, max_tokens: int = 8, **fields: Any) -> Body:
        [said] = messages
        return {"prompt": said["content"] if _is_message(said) else said, "max_tokens": max_tokens, **fields}

    def text(self, reply: Any) -> str:
        return str(reply["choices"][0]["text"])

    def event_text(self, event: Any) -> str:
        return str(event["choices"][0]["text"])

    def is_sign_of_life(self, event: Any) -> bool:
        choice = event["choices"][0]
        return (choice["text"], choice["finish_reason"]) == ("", None)


class Messages(Protocol):
    path = "/v1/messages"
    image_place = "messages[0].content[0].source"

    def image_part(self, url: str) -> Body:
        if not url.startswith("data:image/png;base64,"):
            return {"type": "image", "source": {"type": "url", "url": url}}
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source}

    def content(self, reply: Any) -> Any:
        return reply["content"]

    def text(self, reply: Any) -> str:
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")

    def end(self, reply: Any) -> str:
        return str(reply["stop_reason"])

    def counts(self, reply: Any) -> Counts:
        usage = reply["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        return Counts(usage["input_tokens"] + cached, cached, usage["output_tokens"])

    def event_text(self, event: Any) -> str:
        return str(event.get("delta", {}).get("text", ""))

    def is_sign_of_life(self, event: Any) -> bool:
        return bool(event["type"] == "ping")

    def error(self, told: Any) -> Body:
        assert told["type"] == "error"
        return super().error(told)


class Responses(Protocol):
    path = "/v1/responses"
    list_name = "input"
    limit = "max_output_tokens"
    image_place = "input[0].content[0].image_url"

    def text_part(self, text: str) -> Body:
        return {"type": "input_text", "text": text}

    def image_part(self, url: str) -> Body:
        return {"type": "input_image", "image_url": url}

    def content(self, reply: Any) -> Any:
        return [item.get("content") for item in reply["output"]]

    def text(self, reply: Any) -> str:
        return "".join(item["content"][0]["text"] for item in reply["output"] if item["type"] == "message")

    def end(self, reply: Any) -> str:
        return str(reply["status"])

    def counts(self, reply: Any) -> Counts:
        usage = reply["usage"]
        return Counts(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])

    def event_text(self, event: Any) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def is_sign_of_life(self, event: Any) -> bool:
        return bool(event["type"] == "response.in_progress")

    def error(self, told: Any) -> Body:
        return super().error(told.get("response", told))


PROTOCOLS: dict[str, Protocol] = {
    "chat": Chat(),
    "completions": Completions(),
    "messages": Messages(),
    "responses": Responses(),
}
SEEING = [name for name, protocol in PROTOCOLS.items() if protocol.image_place]
