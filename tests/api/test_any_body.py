"""Whatever JSON comes, it is decoded or refused by name: there is no third way."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.drawing import examples
from vllm_mlx.api.error_replies import OPENAI
from vllm_mlx.api.openai.schema import (
    BODY_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    AssistantMessage,
    ChatCompletionBody,
    CompletionBody,
    ImageContent,
    ToolMessage,
)
from vllm_mlx.core.errors import RequestError

from .bodies import HI, decode, decode_text

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


PARTS = ["text", "refusal", "image_url", "input_audio", "file"]
parts = objects([*ImageContent.model_fields, *PART_FIELDS, "text", "url"], PARTS, json_values)
calls = st.fixed_dictionaries(
    {"id": st.text(max_size=2)},
    optional={"function": st.fixed_dictionaries({"name": scalars, "arguments": json_values})},
)
message_values = json_values | st.lists(parts, max_size=2) | st.lists(calls, max_size=2)
ROLES = ["system", "user", "assistant", "tool", "function"]
message_names = [*AssistantMessage.model_fields, *ToolMessage.model_fields, *MESSAGE_FIELDS]
messages = objects(message_names, ROLES, message_values)
body_names = [*ChatCompletionBody.model_fields, *CompletionBody.model_fields, *BODY_FIELDS]
values = json_values | st.lists(messages, min_size=1, max_size=3)


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from(body_names), values, max_size=4), st.sampled_from([decode, decode_text]))
def test_any_body_is_decoded_or_refused_by_name(fields: dict[str, Any], decoder: Any) -> None:
    try:
        decoder(**fields)
    except RequestError as error:
        encoded = OPENAI.error(error)
        assert encoded.status == 400 and error.param
        encoded.body.to_json()
    except ValidationError as error:
        body = {"messages": HI, "prompt": "Once", **fields}
        refused = OPENAI.validation(error.errors(), body).body.error
        assert refused.param and f"`{refused.param}`" in refused.message
