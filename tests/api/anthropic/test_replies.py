"""Events → wire bytes, streamed and whole."""

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vllm_mlx.api.anthropic.encode import MessageStream
from vllm_mlx.api.text import Unsealer
from vllm_mlx.core.errors import Cancelled, GenerationError, Overloaded
from vllm_mlx.core.events import (
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallStart,
)

from ..events import USAGE, cut_anywhere, finished, replies
from ..streams import named_events
from .bodies import folded, spec, streamed

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def accumulated(wire: bytes) -> Any:
    """What the vendor's own package makes of a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for data in named_events(wire):
        if data["type"] == "ping":
            continue
        message = accumulate_event(event=EVENT.validate_python(data), current_snapshot=message, json_bufs=buffers)
    return json.loads(message.to_json(exclude_unset=True))


@settings(deadline=None)  # the package builds its types at first
@given(st.data(), replies(), st.sampled_from(["visible", "sealed", "hidden"]))
def test_a_streamed_message_is_the_folded_one(data: Any, events: list[GenerationEvent], thinking: str) -> None:
    """But for arguments that are no JSON: there the package reads what it can."""
    whole = folded(events, thinking=thinking)
    wire = accumulated(streamed(data.draw(cut_anywhere(events)), thinking=thinking))
    assert thinking != "hidden" or all(block["type"] != "thinking" for block in whole["content"])
    for message in (whole, wire):
        for block in message["content"]:
            if "_raw" in block.get("input", {}) or block["type"] == "tool_use":
                block.pop("input")
    assert {**wire, "stop_details": None} == {**whole, "stop_details": None}


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (Finished(FinishReason.STOP, replace(USAGE, clamped_max_tokens=9)), "end_turn", None),
        (finished(FinishReason.STOP, 7), "end_turn", None),
        (finished(FinishReason.TOOL_CALLS, "END"), "stop_sequence", "END"),
        (finished(FinishReason.LENGTH, "END"), "max_tokens", None),
    ],
)
def test_ends(end: Finished, reason: str, sequence: str | None) -> None:
    """`tests/golden` has those of one cause."""
    message = folded([TextDelta("x"), end])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    *_, delta, stop = named_events(streamed([TextDelta("x"), end]))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert stop == {"type": "message_stop"}


def test_a_start_that_is_not_known_after_a_silence_is_sent_without_the_cache() -> None:
    stream = MessageStream(spec(), prompt_tokens=20)
    assert stream.open() == b""
    start, ping = named_events(stream.keep_alive())
    assert start["message"]["usage"] == {
        "input_tokens": 20,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert ping == {"type": "ping"}
    assert stream.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert stream.feed(0, Started(20, 12)) == b""
    assert named_events(stream.feed(0, finished()))[-1]["usage"]["cache_read_input_tokens"] == 12


def test_an_error_comes_after_the_end_of_the_open_block() -> None:
    stream = MessageStream(spec(), prompt_tokens=20)
    stream.feed(0, Started(20, 12))
    stream.feed(0, ReasoningDelta("why"))
    signed, stop, error = named_events(stream.fail(GenerationError("It broke.")))
    assert signed["delta"]["type"] == "signature_delta" and stop["type"] == "content_block_stop"
    assert error == {"type": "error", "error": {"type": "api_error", "message": "It broke."}}
    later = Overloaded("Later.", retry_after_s=1)
    [overloaded] = named_events(MessageStream(spec(), prompt_tokens=1).fail(later))
    assert overloaded["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("begun", "sent", "index"),
    [
        ((), ["message_start", "content_block_start"], 0),
        ((Started(20, 12), ReasoningDelta("why")), ["content_block_delta"], 0),
        ((Started(20, 12), ToolCallStart(0, "call_1", "read")), ["content_block_start"], 1),
    ],
    ids=["before all output", "in reasoning", "in a call"],
)
def test_before_an_error_that_forbids_to_send_again_a_block_has_ended(
    begun: tuple[GenerationEvent, ...], sent: list[str], index: int
) -> None:
    """Without one, Claude Code would send the prompt again. The block of a call stays open, so that it is not run."""
    stream = MessageStream(spec(), prompt_tokens=20)
    for event in begun:
        stream.feed(0, event)
    events = named_events(stream.fail(Cancelled()))
    assert [event["type"] for event in events] == [*sent, "content_block_stop", "error"]
    assert {event["index"] for event in events if "index" in event} == {index}


def test_omitted_thinking_travels_in_the_signature() -> None:
    events: list[GenerationEvent] = [Started(20, 12), ReasoningDelta("why "), ReasoningDelta("so"), finished()]
    wire = streamed(events, thinking="sealed")
    assert b"why" not in wire
    [block] = accumulated(wire)["content"]
    assert block == folded(events, thinking="sealed")["content"][0]
    assert block["thinking"] == "" and Unsealer().unseal(block["signature"], "a") == "why so"
