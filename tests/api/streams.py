"""A client's side of a stream: server-sent events back to chunks, chunks back to a message."""

import json
from collections.abc import Iterable
from typing import Any

from vllm_mlx.api.replies import ReplyFold, StreamEncoder
from vllm_mlx.core.events import GenerationEvent

Events = Iterable[tuple[int, GenerationEvent]]


def alone(events: Iterable[GenerationEvent]) -> Events:
    """The events of a reply with one choice."""
    return [(0, event) for event in events]


def stream(encoder: StreamEncoder, events: Events) -> bytes:
    return encoder.open() + b"".join(encoder.feed(index, event) for index, event in events) + encoder.close()


def fold(into: ReplyFold, events: Events) -> Any:
    """The complete reply."""
    for index, event in events:
        into.feed(index, event)
    return json.loads(into.finish())


def payloads(wire: bytes) -> list[str]:
    """The data of each event; every event is one `data:` line and a blank one."""
    *events, rest = wire.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def named_events(wire: bytes) -> list[Any]:
    """The data of each event, whose name is the data's type and whose number, if it has one, is its place."""
    *events, rest = wire.decode().split("\n\n")
    assert rest == ""
    found = []
    for number, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1].get("sequence_number", number) == number
    return found


def chunks(wire: bytes) -> list[dict[str, Any]]:
    *rest, last = payloads(wire)
    assert last == "[DONE]"
    return [json.loads(each) for each in rest]


def choices(wire: bytes, index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(wire) for choice in chunk["choices"] if choice["index"] == index]


def folded_choice(wire: bytes, index: int) -> dict[str, Any]:
    """What a client makes of the chunks of one choice, in the form of a whole reply's choice."""
    parts = choices(wire, index)
    deltas = [part["delta"] for part in parts]
    calls = _folded_calls(deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas) or None
    message: dict[str, Any] = {"role": deltas[0]["role"], "content": None if calls and not content else content}
    message |= {"refusal": None, "reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": [token for each in logprobs for token in each["content"]]} if logprobs else None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
        **{key: value for key, value in parts[-1].items() if key == "finish_details"},
    }


def _folded_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                function = dict(call["function"])
                calls[call["index"]] = {"id": call["id"], "type": call["type"], "function": function}
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return [calls[index] for index in sorted(calls)]
