"""Whatever JSON comes to Messages and Responses, it is decoded or refused in words."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.drawing import examples
from vllm_mlx.api.anthropic import schema as anthropic
from vllm_mlx.api.error_replies import ANTHROPIC, OPENAI
from vllm_mlx.api.responses import schema as responses
from vllm_mlx.api.responses.schema import BODY_FIELDS, SKIPPED_ITEMS
from vllm_mlx.core.errors import RequestError

from .anthropic import bodies as messages_bodies
from .responses import bodies as responses_bodies
from .test_any_body import json_values, objects

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
blocks = st.recursive(
    objects(block_names, [*BLOCKS, *CHANGES], json_values),
    lambda inner: objects(block_names, [*BLOCKS, *CHANGES], st.lists(inner, max_size=2) | inner),
    max_leaves=4,
)
wire_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text() | st.lists(blocks)}
)
message_values = json_values | st.lists(wire_messages, min_size=1, max_size=3) | st.lists(blocks, max_size=2) | blocks


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from(list(anthropic.MessagesBody.model_fields)), message_values, max_size=4))
def test_any_message_body(fields: dict[str, Any]) -> None:
    try:
        messages_bodies.decode(**fields)
    except RequestError as error:
        encoded = ANTHROPIC.error(error)
    except ValidationError as error:
        encoded = ANTHROPIC.validation(error.errors(), messages_bodies.body(fields))
    else:
        return
    assert encoded.status == 400 and json.loads(encoded.body.to_json())["error"]["message"]


ITEMS = ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference"]
PARTS = ["input_text", "output_text", "input_image", "input_file", "refusal", "function", "namespace", "json_schema"]
KINDS = [*ITEMS, *PARTS, *sorted(SKIPPED_ITEMS)[:2]]
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
items = st.recursive(
    objects(item_names, KINDS, json_values),
    lambda inner: objects(item_names, KINDS, st.lists(inner, max_size=2) | inner),
    max_leaves=4,
)
item_values = json_values | st.lists(items, max_size=3) | items
response_names = [*responses.ResponsesBody.model_fields, *BODY_FIELDS]


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from(response_names), item_values, max_size=4))
def test_any_response_body(fields: dict[str, Any]) -> None:
    try:
        responses_bodies.decode(**fields)
    except RequestError as error:
        encoded = OPENAI.error(error)
        assert encoded.status == 400 and error.param
        encoded.body.to_json()
    except ValidationError as error:
        refused = OPENAI.validation(error.errors(), {"input": "hi", **fields}).body.error
        assert refused.param and f"`{refused.param}`" in refused.message
