"""A turn that a model ends anywhere inside its call, from text to wire: clients get arguments that they can read."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.named_formats import OutputParser
from tests.support.rows import row
from vllm_mlx.api.openai.encode import ChatStream, chat_fold
from vllm_mlx.core.events import FinishReason, GenerationEvent, Started, ToolCallEnd

from .anthropic.bodies import folded as folded_message
from .anthropic.bodies import streamed as streamed_message
from .anthropic.test_replies import accumulated
from .bodies import spec
from .events import finished
from .fakes import FakeTokens
from .responses.bodies import folded as folded_response
from .responses.bodies import streamed as streamed_response
from .streams import alone, fold, folded_choice, named_events, stream

FIRST = {"path": "a"}
CALLS = [
    '<tool_call>{"name": "ls", "arguments": {"path": "a"}}</tool_call>'
    '<tool_call>{"name": "ls", "arguments": {"path": "b \\u00e9", "depth": [1, 22], "all": true}}</tool_call>',
    "<tool_call><function=ls><parameter=path>\na\n</parameter></function></tool_call>"
    "<tool_call><function=ls><parameter=path>\nb\n</parameter><parameter=depth>\n22\n</parameter></function></tool_call>",
]


def chat_reply(events: list[GenerationEvent]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a complete reply, and of the same reply streamed."""
    [choice] = fold(chat_fold(spec(), FakeTokens()), alone(events))["choices"]
    return choice, folded_choice(stream(ChatStream(spec(), FakeTokens()), alone(events)), 0)


def chat(events: list[GenerationEvent]) -> list[str]:
    choice, streamed = chat_reply(events)
    assert streamed == choice and choice["finish_reason"] == "tool_calls"
    return [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]


def messages(events: list[GenerationEvent]) -> list[str]:
    message = folded_message(events)
    assert accumulated(streamed_message(events))["content"] == message["content"]
    assert message["stop_reason"] == "tool_use"
    return [json.dumps(block["input"]) for block in message["content"] if block["type"] == "tool_use"]


def responses(events: list[GenerationEvent]) -> list[str]:
    response = folded_response(events)
    done = named_events(streamed_response(events))[-1]["response"]["output"]
    assert [item.get("arguments") for item in done] == [item.get("arguments") for item in response["output"]]
    assert response["status"] == "completed"
    return [item["arguments"] for item in response["output"] if item["type"] == "function_call"]


@row("S4-15")
@pytest.mark.parametrize("protocol", [chat, messages, responses])
@pytest.mark.parametrize("text", CALLS)
def test_arguments_are_whole_wherever_the_model_ended_its_turn(protocol: Any, text: str) -> None:
    start = text.index("</tool_call>") + len("</tool_call>")
    for end in range(start, len(text) + 1):
        parser = OutputParser(None, "hermes", call_ids=iter("12").__next__)
        events = [event for character in text[:end] for event in parser.feed(character)]
        events += parser.finish(is_end=True)
        if not isinstance(events[-1], ToolCallEnd):
            continue  # it shows as text
        first, *rest = map(json.loads, protocol([Started(5, 0), *events, finished(FinishReason.TOOL_CALLS)]))
        assert first == FIRST
        assert all(isinstance(arguments, dict) for arguments in rest)


@row("S4-15")
@pytest.mark.parametrize("text", CALLS)
def test_a_complete_reply_has_the_text_of_a_broken_call(text: str) -> None:
    for end in range(0, len(text) + 1, 3):
        for rest in ("", " oops", "</tool_call> so"):
            parser = OutputParser(None, "hermes", call_ids=iter("12").__next__)
            events = [*parser.feed(text[:end] + rest), *parser.finish(is_end=True)]
            broken = tuple(str(e.index + 1) for e in events if isinstance(e, ToolCallEnd) and e.is_broken)
            end_event = replace(finished(FinishReason.STOP), broken_calls=broken)
            whole, streamed = chat_reply([Started(5, 0), *events, end_event])
            assert whole.get("finish_details", {}).get("broken_tool_calls", []) == list(broken)
            assert whole.get("finish_details") == streamed.get("finish_details")
            announced = streamed["message"].get("tool_calls", [])
            assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in announced)
            kept = [call for call in announced if call["id"] not in broken]
            assert whole["message"].get("tool_calls", []) == kept
            assert whole["message"]["content"] == streamed["message"]["content"]
            message = folded_message([Started(5, 0), *events, end_event])
            assert len([block for block in message["content"] if block["type"] == "tool_use"]) == len(kept)
            response = folded_response([Started(5, 0), *events, end_event])
            assert [one["arguments"] for one in response["output"] if one["type"] == "function_call"] == [
                call["function"]["arguments"] for call in kept
            ]
            assert accumulated(streamed_message([Started(5, 0), *events, end_event]))
            items = named_events(streamed_response([Started(5, 0), *events, end_event]))[-1]["response"]["output"]
            assert [one["status"] for one in items if one["type"] == "function_call"].count("incomplete") == len(broken)
