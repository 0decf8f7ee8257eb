"""Wire types of requests: Messages and count_tokens. What a field means is decided in `decode`."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from ..parameters import GenerationFields, PromptFields
from ..wire import Items, Wire


class MessagesWire(Wire):
    """Extra fields are dropped: Anthropic adds fields by beta headers, and clients send them to every server."""

    model_config = ConfigDict(extra="ignore")


# Tools


class MessagesTool(MessagesWire):
    """`type` is absent or "custom" for the client's own tools; any other is a tool that Anthropic defines."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(MessagesWire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


# Sources


class Base64Source(MessagesWire):
    type: Literal["base64"]
    media_type: str
    data: str


class URLSource(MessagesWire):
    type: Literal["url"]
    url: str


class FileSource(MessagesWire):
    type: Literal["file"]
    file_id: str


class TextSource(MessagesWire):
    type: Literal["text"]
    data: str


# Blocks


class TextBlock(MessagesWire):
    type: Literal["text"]
    text: str


ImageSource = Annotated[Base64Source | URLSource | FileSource, Field(discriminator="type")]


class ImageBlock(MessagesWire):
    type: Literal["image"]
    source: ImageSource


DocumentPart = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ContentSource(MessagesWire):
    type: Literal["content"]
    content: str | Items[DocumentPart]


DocumentSource = Annotated[
    Base64Source | URLSource | FileSource | TextSource | ContentSource, Field(discriminator="type")
]


class DocumentBlock(MessagesWire):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(MessagesWire):
    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]


class ToolReferenceBlock(MessagesWire):
    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]


class ToolResultBlock(MessagesWire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultPart] | None = None
    is_error: bool | None = None


class ThinkingBlock(MessagesWire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(MessagesWire):
    type: Literal["redacted_thinking"]


class ToolUseBlock(MessagesWire):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any] | None = None


class ToolChange(MessagesWire):
    """A tool, given by its name or by its `definition`."""

    name: str | None = None
    tool_name: str | None = None
    definition: MessagesTool | None = None


class ToolChangeBlock(MessagesWire):
    type: Literal["tool_addition", "tool_removal"]
    tool: ToolChange


UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | ToolChangeBlock,
    Field(discriminator="type"),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
SystemBlock = Annotated[TextBlock | ToolChangeBlock, Field(discriminator="type")]

# Messages


class UserMessage(MessagesWire):
    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(MessagesWire):
    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemMessage(MessagesWire):
    role: Literal["system"]
    content: str | Items[SystemBlock]


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]

# Thinking


class ThinkingEnabled(MessagesWire):
    type: Literal["enabled"]
    budget_tokens: int
    display: str | None = None


class ThinkingOther(MessagesWire):
    """Any other type, such as adaptive: the model decides how much it reasons."""

    type: str
    display: str | None = None


def _thinking_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "enabled" if kind == "enabled" else "other"


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("enabled")] | Annotated[ThinkingOther, Tag("other")], Discriminator(_thinking_tag)
]


class OutputConfig(MessagesWire):
    effort: str | None = None
    format: dict[str, Any] | None = None


# Bodies


class CountTokensBody(PromptFields, MessagesWire):
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(GenerationFields, CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    output_format: dict[str, Any] | None = Field(default=None, description="Same as `output_config.format`.")
    mcp_servers: Items[dict[str, Any]] | None = None
