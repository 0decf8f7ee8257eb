"""A wire request of each protocol → its Request; events → the wire bytes of each protocol. Kept as files.

A change that is meant: `python -m tests.api.test_golden` writes them anew, and the diff shows what it does to clients.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.api.anthropic.decode import decode_messages_request
from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.openai.decode import decode_chat, decode_completion
from vllm_mlx.api.openai.encode import ChatStream, chat_fold
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.responses.decode import decode_response
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.core.request import Request

from .bodies import spec
from .events import THINKS_AND_CALLS
from .fakes import FakeTokens
from .streams import stream

FOLDER = Path(__file__).parent / "golden"


def chat(body: Any) -> Request:
    wire = ChatCompletionBody.model_validate(body)
    return decode_chat(wire, reply_id="r", model="tiny", created=5).requests[0]


def completion(body: Any) -> Request:
    wire = CompletionBody.model_validate(body)
    return decode_completion(wire, reply_id="r", model="tiny", created=5).requests[0]


def messages(body: Any) -> Request:
    return decode_messages_request(MessagesBody.model_validate(body), reply_id="r", model="tiny").request


def responses(body: Any) -> Request:
    return decode_response(ResponsesBody.model_validate(body), reply_id="r", model="tiny", created_at=5).request


DECODERS: dict[str, Callable[[Any], Request]] = {
    "chat": chat,
    "completion": completion,
    "messages": messages,
    "responses": responses,
}


def plain(value: Any) -> Any:
    """A core value as JSON: its type's name first, fields at their default left out."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {
            each.name: getattr(value, each.name) for each in dataclasses.fields(value) if not _is_default(value, each)
        }
        return {"": type(value).__name__, **{name: plain(each) for name, each in given.items()}}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(getattr(value, field.name) == default)


def request_of(name: str) -> str:
    body = json.loads((FOLDER / f"{name}.request.json").read_text(encoding="utf-8"))
    return json.dumps(plain(DECODERS[name](body)), indent=1, ensure_ascii=False) + "\n"


def chat_stream() -> str:
    wire = stream(
        ChatStream(spec(stream=True, include_usage=True), FakeTokens()), [(0, each) for each in THINKS_AND_CALLS]
    )
    return wire.decode()


def chat_reply() -> str:
    fold = chat_fold(spec(), FakeTokens())
    for event in THINKS_AND_CALLS:
        fold.feed(0, event)
    return json.dumps(json.loads(fold.finish()), indent=1, ensure_ascii=False) + "\n"


MADE: dict[str, Callable[[], str]] = {
    **{f"{name}.decoded.json": (lambda name=name: request_of(name)) for name in DECODERS},  # type: ignore[misc]
    "chat.sse": chat_stream,
    "chat.json": chat_reply,
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_what_the_file_holds(name: str) -> None:
    assert MADE[name]() == (FOLDER / name).read_text(encoding="utf-8")


def main() -> None:
    for name, make in MADE.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
