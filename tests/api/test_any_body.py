"""Whatever JSON comes, it is decoded or refused in words, and by name where the protocol has names."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.drawing import examples
from vllm_mlx.api.anthropic import schema as anthropic
from vllm_mlx.api.error_replies import ANTHROPIC, OPENAI
from vllm_mlx.api.openai import schema as openai
from vllm_mlx.api.responses import schema as responses
from vllm_mlx.core.errors import RequestError

from .anthropic import bodies as messages_bodies
from .bodies import HI, decode, decode_text
from .responses import bodies as responses_bodies

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def objects(names: list[str], types: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects that look right from afar."""
    given_fields = st.dictionaries(st.sampled_from(names), values, max_size=3)
    return st.builds(
        lambda kind, value, fields: {kind: value, **fields},
        st.sampled_from(["role", "type"]),
        st.sampled_from(types),
        given_fields,
    )


def nested(names: list[str], types: list[str]) -> st.SearchStrategy[Any]:
    """Such objects inside each other."""
    return st.recursive(
        objects(names, types, json_values),
        lambda inner: objects(names, types, st.lists(inner, max_size=2) | inner),
        max_leaves=4,
    )


def bodies(names: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


PARTS = ["text", "refusal", "image_url", "input_audio", "file"]
parts = objects([*openai.ImageContent.model_fields, *openai.PART_FIELDS, "text", "url"], PARTS, json_values)
calls = st.fixed_dictionaries(
    {"id": st.text(max_size=2)},
    optional={"function": st.fixed_dictionaries({"name": scalars, "arguments": json_values})},
)
message_names = [*openai.AssistantMessage.model_fields, *openai.ToolMessage.model_fields, *openai.MESSAGE_FIELDS]
chat_messages = objects(
    message_names,
    ["system", "user", "assistant", "tool", "function"],
    json_values | st.lists(parts, max_size=2) | st.lists(calls, max_size=2),
)
OPENAI_BODIES = bodies(
    [*openai.ChatCompletionBody.model_fields, *openai.CompletionBody.model_fields, *openai.BODY_FIELDS],
    json_values | st.lists(chat_messages, min_size=1, max_size=3),
)

BLOCKS = ["text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"]
CHANGES = ["tool_reference", "tool_addition", "tool_removal", "enabled", "disabled", "base64", "url", "content"]
block_names = [
    *anthropic.DocumentBlock.model_fields,
    *anthropic.ToolResultBlock.model_fields,
    *anthropic.ToolUseBlock.model_fields,
    *anthropic.ThinkingBlock.model_fields,
    *anthropic.MessagesTool.model_fields,
    "tool",
    "data",
]
blocks = nested(block_names, [*BLOCKS, *CHANGES])
wire_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text() | st.lists(blocks)}
)
MESSAGES_BODIES = bodies(
    list(anthropic.MessagesBody.model_fields),
    json_values | st.lists(wire_messages, min_size=1, max_size=3) | st.lists(blocks, max_size=2) | blocks,
)

ITEMS = ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference"]
ITEM_PARTS = ["input_text", "output_text", "input_image", "input_file", "refusal", "function", "namespace"]
item_names = [
    *responses.MessageItem.model_fields,
    *responses.FunctionCallItem.model_fields,
    *responses.ReasoningItem.model_fields,
    *responses.FunctionTool.model_fields,
    *responses.WebSearchTool.model_fields,
    *responses.CustomTool.model_fields,
    "output",
    "text",
    "image_url",
    "format",
]
items = nested(item_names, [*ITEMS, *ITEM_PARTS, "json_schema", *sorted(responses.SKIPPED_ITEMS)[:2]])
RESPONSES_BODIES = bodies(
    [*responses.ResponsesBody.model_fields, *responses.BODY_FIELDS],
    json_values | st.lists(items, max_size=3) | items,
)

PROTOCOLS: dict[str, tuple[Callable[..., Any], st.SearchStrategy[dict[str, Any]], dict[str, Any]]] = {
    "chat": (decode, OPENAI_BODIES, {"messages": HI}),
    "completions": (decode_text, OPENAI_BODIES, {"prompt": "Once"}),
    "messages": (messages_bodies.decode, MESSAGES_BODIES, messages_bodies.body({})),
    "responses": (responses_bodies.decode, RESPONSES_BODIES, {"input": "hi"}),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=examples(50))
@given(st.data())
def test_any_body_is_decoded_or_refused(protocol: str, data: Any) -> None:
    decoder, strategy, least = PROTOCOLS[protocol]
    fields = data.draw(strategy)
    envelope = ANTHROPIC if protocol == "messages" else OPENAI
    try:
        decoder(**fields)
    except RequestError as error:
        encoded = envelope.error(error)
    except ValidationError as error:
        encoded = envelope.validation(error.errors(), least | fields)
        detail = encoded.body.error
        assert protocol == "messages" or f"`{detail.param}`" in detail.message
    else:
        return
    refused = json.loads(encoded.body.to_json())["error"]
    assert encoded.status == 400 and refused["message"]
    assert protocol == "messages" or refused["param"]
