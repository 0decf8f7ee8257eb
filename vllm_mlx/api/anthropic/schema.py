"""Wire types of requests: Messages and count_tokens. `decode` decides the meaning of a field.

A field that the types do not declare is ignored or refused by a table. A field in no table is reported and has no
effect: Anthropic adds fields by beta headers, and clients send them to every server.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from ..error_replies import UNTHREADED
from ..guides import SchemaFormat
from ..parameters import CACHE_HINT, GenerationFields, PromptFields
from ..search import SEARCH_NAME, UserLocation
from ..wire import Body, ExtraFields, Ignored, Items, LeftOut, Refused, Wire, field_of

_ACCOUNT = Ignored("names an account of the vendor; this server has none")
_COUNTED = Ignored("it does not change the prompt")

BODY_FIELDS: ExtraFields = {
    "metadata": Ignored("names the end user for abuse reports"),
    "cache_control": CACHE_HINT,
    "service_tier": Ignored("there is one tier"),
    "speed": Ignored("there is one speed"),
    "inference_geo": Ignored("the model runs on this machine"),
    "container": Ignored("belongs to tools that the vendor runs; this server runs none"),
    "context_management": Ignored("the server removes nothing from the conversation"),
    "diagnostics": Ignored("asks why the cache missed; the log and the header `x-cache-receipt` tell it"),
    "betas": Ignored("names of the vendor's trials; every field means the same without them"),
    "fallbacks": Ignored("names other models to try; only the request's own is tried"),
    "fallback_credit_token": _ACCOUNT,
    "billing_policy": _ACCOUNT,
    "user_profile_id": _ACCOUNT,
    "workspace_id": _ACCOUNT,
    "compaction": Refused("Ask for a summary of the conversation in a message."),
    "thread": Refused("Send the complete conversation; this server keeps none of it.", UNTHREADED),
}
_UNCOUNTED = (
    "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "output_format", "mcp_servers",
    "cache_reasoning_tokens",
)  # fmt: skip
COUNT_FIELDS: ExtraFields = {**BODY_FIELDS, **dict.fromkeys(_UNCOUNTED, _COUNTED)}
MARKS: ExtraFields = {"cache_control": CACHE_HINT}
_CALLED: ExtraFields = {
    **MARKS,
    "caller": Ignored("says which of the vendor's tools made the call"),
    "toolset_name": Ignored("the tool's own name tells it from others"),
}
TOOL_FIELDS: ExtraFields = {
    **MARKS,
    "allowed_callers": Ignored("only the model calls tools"),
    "eager_input_streaming": Ignored("arguments are always streamed as they come"),
    "response_inclusion": Ignored("it is about results that code execution read, and this server executes none"),
    "input_examples": Ignored("chat templates have no place for examples"),
    **dict.fromkeys(
        ("max_characters", "display_width_px", "display_height_px", "display_number", "enable_zoom"),
        Ignored("the client runs the tool; the model sees its name"),
    ),
}

# Tools that Anthropic runs on its own servers; this server cannot.
RUN_BY_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")

_IN_RESULTS = ("text", "image", "document", "search_result", "tool_reference")
_OF_ASSISTANTS = ("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result")
_OF_THE_VENDOR = ("_tool_use", "_tool_result", "container_upload", "compaction")  # ends of types
_TEXTS = frozenset({"text", "content", "title", "summary", "output", "stdout", "stderr", "lines", "error_message"})
Known = TypeVar("Known")


class MessagesWire(Wire):
    extras: ClassVar[ExtraFields | None] = MARKS
    tolerates_unknown = True


# Tools


class MessagesTool(MessagesWire):
    """A tool. `type` is absent or "custom" for the client's own tools; any other is a tool that Anthropic defines."""

    extras = TOOL_FIELDS
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    max_uses: int | None = Field(default=None, ge=1, description="Limit of web searches, at most 20.")
    allowed_domains: Items[str] | None = Field(default=None, description="A web search shows only these.")
    blocked_domains: Items[str] | None = Field(default=None, description="A web search shows none of these.")
    user_location: UserLocation | None = Field(default=None, description="The model sees it.")

    @property
    def is_web_search(self) -> bool:
        return (self.type or "custom").startswith("web_search_")

    @property
    def is_run_by_anthropic(self) -> bool:
        return (self.type or "custom").startswith(RUN_BY_ANTHROPIC)

    def extra_rules(self) -> ExtraFields | None:
        """Return no rules for a tool that the model never sees: its other fields are not judged."""
        return None if self.is_run_by_anthropic and not self.is_web_search else self.extras


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
    extras: ClassVar[ExtraFields | None] = {**MARKS, "media_type": Ignored("it is always plain text")}
    type: Literal["text"]
    data: str


# Blocks


class OtherBlock(LeftOut):
    """A block that another server or a later version of the protocol wrote. It is left out of the prompt."""

    extras: ClassVar[ExtraFields | None] = None
    type: str = Field(examples=["mcp_tool_result"])

    @property
    def texts(self) -> list[str]:
        """Return the texts for the model, in order, without addresses, ids, names, arguments and sealed fields."""
        return list(_texts({"type": self.type, **(self.model_extra or {})}))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case {"type": "text", "data": str(text)}:
            yield text
        case dict():
            for name, member in value.items():
                for inner in member if isinstance(member, list) else [member]:
                    if isinstance(inner, str) and name in _TEXTS:
                        yield from filter(None, [inner])
                    elif name not in ("input", "tools"):
                        yield from _texts(inner)


def _result_tag(value: Any) -> str:
    """Return the branch of a part of a tool's result."""
    kind = field_of(value, "type")
    return "other" if isinstance(kind, str) and kind not in _IN_RESULTS else "known"


def _assistant_tag(value: Any) -> str:
    """Return the branch of an assistant's block."""
    kind = field_of(value, "type")
    is_known = kind in _OF_ASSISTANTS and (kind != "server_tool_use" or field_of(value, "name") == SEARCH_NAME)
    return "other" if isinstance(kind, str) and not is_known else "known"


def _user_tag(value: Any) -> str:
    """Return the branch of a user's block: another type is refused if it may be misspelt, or hold the question."""
    kind = field_of(value, "type")
    return "other" if isinstance(kind, str) and kind.endswith(_OF_THE_VENDOR) else "known"


OrOther = Annotated[Known, Field(discriminator="type"), Tag("known")] | Annotated[OtherBlock, Tag("other")]


class TextBlock(MessagesWire):
    extras: ClassVar[ExtraFields | None] = {
        **MARKS,
        "citations": Ignored("citations that an earlier reply carried; the text holds them too"),
    }
    type: Literal["text"]
    text: str


ImageSource = Annotated[Base64Source | URLSource | FileSource, Field(discriminator="type")]


class ImageBlock(MessagesWire):
    extras: ClassVar[ExtraFields | None] = {
        **MARKS,
        "transformations": Ignored("the model's own processor sets the size of an image"),
    }
    type: Literal["image"]
    source: ImageSource


DocumentPart = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ContentSource(MessagesWire):
    type: Literal["content"]
    content: str | Items[DocumentPart]


DocumentSource = Annotated[
    Base64Source | URLSource | FileSource | TextSource | ContentSource, Field(discriminator="type")
]


class Citations(MessagesWire):
    enabled: bool | None = None


class DocumentBlock(MessagesWire):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(MessagesWire):
    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]
    citations: Citations | None = None


class ToolReferenceBlock(MessagesWire):
    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    OrOther[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock], Discriminator(_result_tag)
]


class ToolResultBlock(MessagesWire):
    extras = _CALLED
    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: str | Items[ResultPart] | None = None
    is_error: bool | None = None


class ThinkingBlock(MessagesWire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(MessagesWire):
    extras: ClassVar[ExtraFields | None] = {**MARKS, "data": Ignored("only the server that made it can read it")}
    type: Literal["redacted_thinking"]


class ToolUseBlock(MessagesWire):
    extras = _CALLED
    type: Literal["tool_use"]
    id: str = ""
    name: str = Field(min_length=1)
    input: dict[str, Any] | None = None


class ServerToolUseBlock(MessagesWire):
    extras = _CALLED
    type: Literal["server_tool_use"]
    id: str = Field(min_length=1)
    name: Literal["web_search"]  # calls of other tools are left out
    input: dict[str, Any] | None = None


class WebSearchResult(MessagesWire):
    extras: ClassVar[ExtraFields | None] = {**MARKS, "page_age": Ignored("the model does not see it")}
    type: Literal["web_search_result"]
    url: str
    title: str
    encrypted_content: str = ""


class WebSearchError(MessagesWire):
    type: Literal["web_search_tool_result_error"]
    error_code: str


class WebSearchResultBlock(MessagesWire):
    extras = _CALLED
    type: Literal["web_search_tool_result"]
    tool_use_id: str
    content: Items[WebSearchResult] | WebSearchError


class ToolChange(MessagesWire):
    """A tool, given by its name or by its `definition`."""

    extras: ClassVar[ExtraFields | None] = {
        **MARKS,
        "type": Ignored("the other fields say how the tool is given"),
        "server_name": Ignored("a tool of an MCP server is shown as not available"),
    }
    name: str | None = None
    tool_name: str | None = None
    definition: MessagesTool | None = None


class ToolChangeBlock(MessagesWire):
    type: Literal["tool_addition", "tool_removal"]
    tool: ToolChange


UserBlock = Annotated[
    OrOther[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | ToolChangeBlock],
    Discriminator(_user_tag),
]
AssistantBlock = Annotated[
    OrOther[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ServerToolUseBlock | WebSearchResultBlock
    ],
    Discriminator(_assistant_tag),
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
    extras: ClassVar[ExtraFields | None] = {
        **MARKS,
        "clear_at": Ignored("the message stays in its place, so that a prompt extends the one before it"),
        "output_config": Ignored("the effort of the request holds for the complete conversation"),
    }
    role: Literal["system"]
    content: str | Items[SystemBlock]


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]

# Thinking


_THINKING: ExtraFields = {"block_binding": Ignored("reasoning is never bound to the request that made it")}


class ThinkingEnabled(MessagesWire):
    extras = _THINKING
    type: Literal["enabled"]
    budget_tokens: int
    display: str | None = None


class ThinkingOther(MessagesWire):
    """Any other type, such as adaptive: the model decides how much it reasons."""

    extras = _THINKING
    type: str
    display: str | None = None


def _thinking_tag(value: Any) -> str:
    return "enabled" if field_of(value, "type") == "enabled" else "other"


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("enabled")] | Annotated[ThinkingOther, Tag("other")], Discriminator(_thinking_tag)
]


class OutputConfig(MessagesWire):
    extras: ClassVar[ExtraFields | None] = {
        **MARKS,
        "task_budget": Ignored("the model is not given a budget for several requests"),
    }
    effort: str | None = None
    format: SchemaFormat | None = None


# Bodies


class CountTokensBody(Body, PromptFields, MessagesWire):
    extras = COUNT_FIELDS
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(GenerationFields, CountTokensBody):
    extras = BODY_FIELDS
    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    output_format: SchemaFormat | None = Field(default=None, description="Same as `output_config.format`.")
    mcp_servers: Items[dict[str, Any]] | None = None
