"""Every row of the table of clients in docs/api.md, against a request that its client really sent.

Requests are cut down, and their words are made up.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.api.parameters import BILLING_HEADER, without_client_marks
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request
from vllm_mlx.prompt.template_messages import apart, template_messages

from .anthropic.bodies import decode as anthropic
from .bodies import chat
from .responses.bodies import decode as responses

FOLDER = Path(__file__).parent / "quirks"
RECORDINGS = sorted(FOLDER.glob("*.json"))


DECODERS: dict[str, Callable[..., Request]] = {"anthropic": anthropic, "responses": responses, "chat": chat}


def recorded(name: str) -> list[Any]:
    requests: list[Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["requests"]
    return requests


def decoded(name: str) -> list[Request]:
    decoder = DECODERS[json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["protocol"]]
    return [decoder(**body) for body in recorded(name)]


def messages(request: Request) -> tuple[Message, ...]:
    assert request.messages is not None
    return request.messages


def rendered(request: Request) -> str:
    """All that a template gets to see."""
    return json.dumps([[tool.to_openai() for tool in request.tools], template_messages([*apart(messages(request))])])


@pytest.mark.parametrize("name", [path.stem for path in RECORDINGS if path.stem != "billing_line"])
def test_each_request_extends_the_one_before(name: str) -> None:
    """Tools and all messages but the marks of the client are the same, in the same order."""
    requests = decoded(name)
    for earlier, later in itertools.pairwise(requests):
        assert later.tools == earlier.tools
        assert messages(later)[: len(messages(earlier))] == messages(earlier)


def test_billing_line() -> None:
    first, second = recorded("billing_line")
    lines = [each["system"][0]["text"] for each in (first, second)]
    assert all(line.startswith(BILLING_HEADER) for line in lines) and lines[0] != lines[1]
    assert "billing" not in "".join(map(rendered, decoded("billing_line")))
    assert messages(anthropic(**first))[0].parts[0] == TextPart(first["system"][1]["text"])
    assert messages(anthropic(**{**first, "system": lines[0]}))[0].role == "user"


def test_billing_line_in_front_of_other_text() -> None:
    """As a proxy joins the blocks of a system prompt."""
    billed = Message("system", (TextPart(f"{BILLING_HEADER} cc_version=1;\nYou are."),))
    assert without_client_marks([billed]) == (Message("system", (TextPart("You are."),)),)
    asked = Message("user", (TextPart(f"{BILLING_HEADER} what is this?"),))
    assert without_client_marks([asked]) == (asked,)


def test_string_is_text() -> None:
    first, second = recorded("string_is_text")
    [block] = first["messages"][1]["content"]
    assert block.pop("cache_control") and second["messages"][1]["content"] == block["text"]
    assert messages(anthropic(**first))[2] == messages(anthropic(**second))[2]


def test_cache_control() -> None:
    first, second = recorded("cache_control")
    marked = [json.dumps(each).count("cache_control") for each in (first, second)]
    assert marked == [3, 3] and "cache_control" not in rendered(anthropic(**second))


def test_system_in_the_middle() -> None:
    [request] = decoded("system_in_the_middle")
    assert [message.role for message in messages(request)] == ["system", "user", "system"]


def test_deferred_tools() -> None:
    _, second, third = decoded("deferred_tools")
    listed = [[tool["name"] for tool in body["tools"]] for body in recorded("deferred_tools")]
    assert listed[0] != listed[1]
    assert [tool.name for tool in second.tools] == ["Bash", "Read", "ToolSearch"]
    [found] = [part for message in messages(second) for part in message.parts if isinstance(part, ToolResultPart)]
    definitions = [json.loads(part.text)["function"]["name"] for part in found.content if isinstance(part, TextPart)]
    assert definitions == ["WebFetch", "TaskStop"]
    assert "DeferredToolPlaceholder" not in rendered(third)


def test_tool_order() -> None:
    [request] = decoded("tool_order")
    [body] = recorded("tool_order")
    assert [tool.name for tool in request.tools] == [
        tool["name"] for tool in body["tools"] if not tool.get("defer_loading")
    ]


def test_item_ids() -> None:
    for body, request in zip(recorded("item_ids"), decoded("item_ids"), strict=True):
        ids = [item["id"] for item in body["input"]]
        assert ids and not [each for each in ids if each in rendered(request)]


def test_whitespace() -> None:
    *_, last = decoded("whitespace")
    [reply, *_] = [message for message in messages(last) if message.role == "assistant"]
    assert isinstance(reply.parts[0], ReasoningPart) and isinstance(reply.parts[2], ToolCallPart)
    assert reply.parts[1] == TextPart("\n\nCumef mehu kiga. \n")
    *_, last = decoded("whitespace.opencode")
    thoughts = [part for message in messages(last) for part in message.parts if isinstance(part, ReasoningPart)]
    assert thoughts and all(part.text.endswith("\n") for part in thoughts)
