"""Wire types of requests: Responses. `decode` decides the meaning of a field.

An extra field is ignored or refused by a table. One in no table is refused as unknown in the body, and reported in
items and tools: clients send items back with all fields of earlier replies. An item of unknown type is refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ...core.request import MAX_LOGPROBS
from ..guides import SchemaFormat
from ..parameters import CACHE_HINT, OPENAI_EXTRAS, CustomInput, Detail, OpenAIFields, ReasoningEffort, TokenLimit
from ..search import ContextSize, UserLocation
from ..wire import AtMost, Body, ExtraFields, Ignored, Items, LeftOut, Refused, Wire, field_of

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_WAITS = Ignored("the model goes on once every call has its result")
_BUILT_IN = "It belongs to a built-in tool, and this server has none."

BODY_FIELDS: ExtraFields = {
    **OPENAI_EXTRAS,
    "client_metadata": Ignored("the client's own bookkeeping"),
    "stream_options": Ignored("padding against traffic analysis; events carry none"),
    "truncation": Ignored(
        "a prompt that does not fit is refused: cut in the middle, it would be a new prompt",
        ("disabled", "auto"),
        "Use 'disabled'.",
    ),
    "conversation": Refused("Use `previous_response_id`, or send the complete input."),
    "prompt": Refused("This server keeps no prompts. Send the text itself."),
    "context_management": Refused("Shorten the input on your side."),
    "access_programs": Ignored("names programs of the vendor; this server has none"),
    "background_options": Ignored("chooses a price; a background reply starts at once"),
    "image": Ignored("the model's own processor sets the size of an image"),
}
ITEM_FIELDS: ExtraFields = {
    "id": Ignored("every session has new ones; they never reach the prompt"),
    "status": Ignored("what was cut off is shown as it is"),
    "phase": Ignored("chat templates do not know it"),
    "caller": Ignored("only the model calls tools"),
    "name": Ignored("a result has the name of its call"),
    "namespace": Ignored("a result belongs to its call, and a custom tool to no namespace"),
    "type": Ignored("there is one type in this place"),
    "async": _WAITS,
}
_IN_REASONING = Ignored("the item of reasoning after it holds the search and its result")
PART_FIELDS: ExtraFields = {
    "annotations": Ignored("citations that an earlier reply carried; the text holds them too"),
    "logprobs": Ignored("they describe an earlier reply"),
    "prompt_cache_breakpoint": CACHE_HINT,
}
TOOL_FIELDS: ExtraFields = {
    "allowed_callers": Ignored("only the model calls tools"),
    "defer_loading": Ignored("every tool is shown to the model"),
    "output_schema": Ignored("chat templates have no place for it"),
    "async": _WAITS,
}

INCLUDED: ExtraFields = {
    "reasoning.encrypted_content": Ignored("honoured: the client sends the reasoning back inside the item"),
    "web_search_call.action.sources": Ignored("honoured: the items of searches list the pages"),
    "web_search_call.results": Ignored("honoured: the items of searches hold what was found"),
    "file_search_call.results": Ignored(_BUILT_IN),
    "code_interpreter_call.outputs": Ignored(_BUILT_IN),
    "computer_call_output.output.image_url": Ignored(_BUILT_IN),
    "message.input_image.image_url": Ignored("input items are listed as they were sent"),
    LOGPROBS: Ignored("honoured: parts of text hold log-probabilities, of as many tokens as `top_logprobs` says"),
}

# Items that another server or the client made for itself. The model here never saw them.
SKIPPED_ITEMS = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction", "compaction_summary",
    "computer_call", "computer_call_output", "file_search_call", "ghost_snapshot", "image_generation_call",
    "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call",
    "tool_search_output",
})  # fmt: skip

# Content


class _Part(Wire):
    extras: ClassVar[ExtraFields | None] = PART_FIELDS
    tolerates_unknown = True


class InputText(_Part):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str


class InputImage(_Part):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


class InputFile(_Part):
    extras: ClassVar[ExtraFields | None] = {
        **PART_FIELDS,
        "detail": Ignored("the model's own processor sets the size of a page"),
    }
    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None


ContentPart = Annotated[InputText | RefusalPart | InputImage | InputFile, Field(discriminator="type")]

# Items


class _Item(Wire):
    extras: ClassVar[ExtraFields | None] = ITEM_FIELDS
    tolerates_unknown = True


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str | None = None
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str | None = None


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str | None = None
    name: str = Field(min_length=1)
    input: str


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: str | Items[ContentPart] | dict[str, Any] | None = None


class ReasoningText(_Item):
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Items[ReasoningText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


class SearchAction(Wire):
    extras: ClassVar[ExtraFields | None] = dict.fromkeys(
        ("type", "queries", "sources", "url", "pattern"), _IN_REASONING
    )
    query: str | None = None


class WebSearchCallItem(_Item):
    """The place of a search in an earlier reply. An item of reasoning after it holds the call and its results."""

    extras: ClassVar[ExtraFields | None] = {
        **ITEM_FIELDS,
        "results": _IN_REASONING,
        "encrypted_content": _IN_REASONING,
    }
    type: Literal["web_search_call"]
    action: SearchAction | None = None


class ItemReference(_Item):
    type: Literal["item_reference"] = "item_reference"
    id: str


class OtherItem(LeftOut):
    """An item that another server or the client made for itself, or one of an unknown type, which is refused."""


_ITEM_TAGS = (
    "message", "function_call", "custom_tool_call", "call_output", "reasoning", "web_search_call", "item_reference",
)  # fmt: skip


def _item_tag(value: Any) -> str:
    """Return the branch of an item. Clients may omit the type of a message, and of a reference, which is an id."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "message")
    if kind is None:
        return "item_reference" if "id" in value and "role" not in value else "message"
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "call_output"
    return kind if kind in _ITEM_TAGS else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_tag),
]

# Tools


class _Tool(Wire):
    extras: ClassVar[ExtraFields | None] = TOOL_FIELDS
    tolerates_unknown = True
    type: str
    name: str | None = None


class FunctionTool(_Tool):
    """Flat, unlike in chat completions."""

    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(_Tool):
    """Its input is one text."""

    type: Literal["custom"]
    description: str | None = None
    format: CustomInput | None = None


class NamespaceTool(_Tool):
    extras: ClassVar[ExtraFields | None] = {
        **TOOL_FIELDS,
        "description": Ignored("the model sees the descriptions of the tools inside it"),
    }
    type: Literal["namespace"]
    tools: "Items[AnyTool] | None" = None


class SearchFilters(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    allowed_domains: Items[str] | None = None
    blocked_domains: Items[str] | None = None


class WebSearchTool(Wire):
    extras: ClassVar[ExtraFields | None] = {
        **TOOL_FIELDS,
        "search_content_types": Ignored("what is found are texts"),
    }
    tolerates_unknown = True
    type: str
    filters: SearchFilters | None = None
    user_location: UserLocation | None = None
    search_context_size: ContextSize | None = None
    external_web_access: bool | None = None

    @property
    def is_live(self) -> bool:
        """Return whether the search may use the network; if not, it needs an index, and this server has none."""
        return self.external_web_access is not False


class BuiltInTool(Wire):
    """A tool that the model does not see. Its own fields are not examined."""

    type: str


def _tool_tag(value: Any) -> str:
    kind = field_of(value, "type")
    if isinstance(kind, str) and kind.startswith("web_search"):
        return "web_search"
    return kind if kind in ("function", "custom", "namespace") else "other"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[WebSearchTool, Tag("web_search")]
    | Annotated[BuiltInTool, Tag("other")],
    Discriminator(_tool_tag),
]
NamespaceTool.model_rebuild()


class ResponsesToolChoice(Wire):
    type: str
    name: str | None = None

    @property
    def is_web_search(self) -> bool:
        return self.type.startswith("web_search")

    def extra_rules(self) -> ExtraFields | None:
        """Return no rules for a choice of another type, which is refused by its type."""
        return {} if self.type in ("function", "custom") or self.is_web_search else None


class AllowedToolChoice(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    type: Literal["allowed_tools"]
    mode: str
    tools: Items[dict[str, Any]]


# Settings


class ReasoningSettings(Wire):
    extras: ClassVar[ExtraFields | None] = {
        "context": Ignored("the chat template decides which reasoning it shows"),
        "mode": Ignored("there is one mode", ("standard",), "This server has one mode: leave `mode` out."),
    }
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(Wire):
    extras: ClassVar[ExtraFields | None] = {"verbosity": Ignored("open models have no such control")}
    format: SchemaFormat | None = None


# Body


class ResponsesBody(Body, OpenAIFields):
    extras = BODY_FIELDS
    input: str | Items[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: TokenLimit = Field(default=None, description="Up to the context window if left out or -1.")
    tools: Items[AnyTool] | None = None
    tool_choice: str | AllowedToolChoice | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tool_calls: int | None = Field(default=None, ge=1, description="Web searches; at most 20.")
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    include: Items[str] | None = None
    metadata: Annotated[dict[str, str], AtMost(MAX_METADATA)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
