"""Wire types of requests: Responses. What a field means is decided in `decode`.

Extra fields of items and tools are kept but not read: clients send items back with all fields of earlier replies.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..parameters import Detail, OpenAIFields, ReasoningEffort
from ..wire import AtMost, Body, Items, Wire
from .fields import BODY_FIELDS

MAX_METADATA = 16


# Content


class InputText(Wire):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class InputImage(Wire):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


class InputFile(Wire):
    type: Literal["input_file"]


ContentPart = Annotated[InputText | RefusalPart | InputImage | InputFile, Field(discriminator="type")]

# Items


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]


class FunctionCallItem(Wire):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str | None = None


class CustomCallItem(Wire):
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: str


class CallOutputItem(Wire):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[ContentPart]


class ReasoningText(Wire):
    text: str


class ReasoningItem(Wire):
    type: Literal["reasoning"]
    summary: Items[ReasoningText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(Wire):
    type: Literal["item_reference"]
    id: str


class OtherItem(Wire):
    type: str


_TAGS = {
    "message": "message",
    "function_call": "function_call",
    "custom_tool_call": "custom_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "item_reference": "reference",
}


def _item_tag(value: Any) -> str:
    """The branch of an item. Clients may omit the type of a message."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return _TAGS.get(kind, "other") if isinstance(kind, str) else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_tag),
]

# Tools


class ResponsesTool(Wire):
    """A tool; flat, unlike in chat completions. A namespace has `tools` of its own."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: "Items[ResponsesTool] | None" = None
    format: Any = None  # the format of a custom tool's input


class ResponsesToolChoice(Wire):
    type: str
    name: str | None = None


# Settings


class ReasoningSettings(Wire):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(Wire):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


# Body


class ResponsesBody(Body, OpenAIFields):
    extras = BODY_FIELDS
    input: str | Items[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, description="Up to the context window if left out.")
    tools: Items[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    include: Items[str] | None = None
    metadata: Annotated[dict[str, str], AtMost(MAX_METADATA)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
