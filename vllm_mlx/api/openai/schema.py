"""Wire types of requests: chat completions and completions. `decode` decides the meaning of a field.

A field that the types do not declare is ignored or refused by a table; a field in no table is refused as unknown.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ...core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ..guides import ChatFormat, TagField
from ..parameters import (
    CACHE_HINT,
    OPENAI_EXTRAS,
    CustomInput,
    Detail,
    EchoLimit,
    OpenAIFields,
    ReasoningEffort,
    TokenLimit,
)
from ..responses.schema import BODY_FIELDS as RESPONSES_FIELDS
from ..responses.schema import InputFile, InputImage, ResponsesBody
from ..search import ContextSize, UserLocation
from ..wire import AtMost, Body, ExtraFields, Ignored, Items, Refused, Wire, field_of

_TOOLS = "Use `tools` and `tool_choice`."

BODY_FIELDS: ExtraFields = {
    **OPENAI_EXTRAS,
    "metadata": Ignored("labels for stored replies; nothing is stored"),
    "store": Ignored("nothing is stored", (False,), "Replies are not stored; leave `store` out."),
    "verbosity": Ignored("it is the default", ("medium",), "Ask for a short or long reply in the prompt."),
    "audio": Refused("This server generates no audio."),
    "functions": Refused(_TOOLS),
    "function_call": Refused(_TOOLS),
    "documents": Refused("Put documents into the messages."),
    "guided_decoding_backend": Ignored("there is one backend"),
    "guided_whitespace_pattern": Refused("White space is always bounded."),
    "return_token_ids": Ignored("it is the default", (False,), "Token ids are not returned."),
    "return_tokens_as_token_ids": Ignored("it is the default", (False,), "Token ids are not returned."),
    "prompt_logprobs": Refused("Completions return them with `echo` and `logprobs`."),
    "use_beam_search": Ignored("it is the default", (False,), "Beam search is not supported."),
    "length_penalty": Ignored("it is the default", (1, 1.0), "It belongs to beam search, which is not supported."),
    "spaces_between_special_tokens": Ignored("it is the default", (True,), "It is not supported."),
    "add_special_tokens": Refused("It is not supported."),
    "truncate_prompt_tokens": Refused("Shorten the prompt on your side."),
    "repetition_detection": Refused("It is not supported."),
    "stream_interval": Ignored("it is the default", (1,), "Every token is sent as soon as it is sampled."),
    "typical_p": Ignored("it is the default: off", (1, 1.0), "It is not supported."),
    "cache_prompt": Ignored(
        "the prefix cache serves every request, where it is on", (True,), "The operator decides whether it is on."
    ),
}

COMPLETION_FIELDS: ExtraFields = {
    **BODY_FIELDS,
    "prediction": Ignored("only chat completions take it, and it never changes a reply"),
    "web_search_options": Refused("Searches run in chat completions, Messages and Responses."),
}

CHAT_FIELDS: ExtraFields = {
    **BODY_FIELDS,
    "suffix": Refused("Completions take it, for models that can fill in."),
    "input": Refused("Send one of the two: `input` alone is read as /v1/responses reads it.", beside="messages"),
}

STREAM_OPTION_FIELDS: ExtraFields = {
    "include_obfuscation": Ignored("padding against traffic analysis; chunks carry none"),
}

MESSAGE_FIELDS: ExtraFields = {
    "id": Ignored("the client's own bookkeeping"),
    "annotations": Ignored("citations that an earlier reply carried; the text holds them too"),
    "cache_control": CACHE_HINT,
    "provider_specific_fields": Ignored("the client library's own bookkeeping"),
    "refusal": Ignored("only an assistant's refusal is text"),
    "audio": Refused("Audio is not supported."),
    "function_call": Refused("Use `tool_calls`."),
}

PART_FIELDS: ExtraFields = {
    "cache_control": CACHE_HINT,
    "prompt_cache_breakpoint": CACHE_HINT,
    "annotations": Ignored("citations that an earlier reply carried; the text holds them too"),
    "logprobs": Ignored("they describe an earlier reply"),
}


class ChatWire(Wire):
    """Base of these types. An extra field that has no rule in `extras` is refused."""

    extras: ClassVar[ExtraFields | None] = {}


class _Part(ChatWire):
    extras = PART_FIELDS


class _Message(ChatWire):
    extras = MESSAGE_FIELDS
    name: str | None = None


# Messages


class TextContent(_Part):
    type: Literal["text", "input_text", "output_text"]  # the other two as in Responses
    text: str


class RefusalContent(_Part):
    type: Literal["refusal"]
    refusal: str


class ImageURL(ChatWire):
    url: str
    detail: Detail | None = None


class ImageContent(_Part):
    type: Literal["image_url"]
    image_url: ImageURL | str


FPS = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class VideoURL(ChatWire):
    url: str


class VideoContent(_Part):
    type: Literal["video_url"]
    video_url: VideoURL | str
    fps: FPS | None = None


class FramesContent(_Part):
    """A video given as its frames, in the form that Qwen's own tools write."""

    type: Literal["video"]
    video: Items[str] = Field(min_length=1)
    fps: FPS | None = None


class FileData(ChatWire):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FileContent(_Part):
    type: Literal["file"]
    file: FileData


UserPart = Annotated[
    TextContent | ImageContent | VideoContent | FramesContent | FileContent | InputImage | InputFile,
    Field(discriminator="type"),
]
AssistantPart = Annotated[TextContent | RefusalContent, Field(discriminator="type")]


class CalledFunction(ChatWire):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class ChatToolCall(ChatWire):
    extras: ClassVar[ExtraFields | None] = {
        "index": Ignored("a remainder of a streamed reply"),
        "provider_specific_fields": Ignored("the client library's own bookkeeping"),
        "extra_content": Ignored("the client library's own bookkeeping"),
    }
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: str | Items[TextContent]


class UserMessage(_Message):
    role: Literal["user"]
    content: str | Items[UserPart]


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: str | Items[AssistantPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Items[dict[str, Any]] | None = None
    thinking_blocks: Items[dict[str, Any]] | None = None
    tool_calls: Items[ChatToolCall] | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: str | Items[UserPart] | None = None
    tool_call_id: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# Tools


class ChatFunction(ChatWire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(ChatWire):
    extras: ClassVar[ExtraFields | None] = {"cache_control": CACHE_HINT}
    type: Literal["function"]
    function: ChatFunction


class FlatFunction(ChatFunction):
    """A function in the form of Responses, as Cursor puts it among the tools of chat completions."""

    extras: ClassVar[ExtraFields | None] = {"cache_control": CACHE_HINT}
    type: Literal["function"]


class FlatCustom(ChatWire):
    """A tool in the form of Responses whose input is one text."""

    extras: ClassVar[ExtraFields | None] = {
        "cache_control": CACHE_HINT,
        "custom": Refused("Write `name` and `format` beside `type`; its calls come as calls of a function."),
    }
    name: str = Field(min_length=1)
    description: str | None = None
    type: Literal["custom"]
    format: CustomInput | None = None


def _tool_form(value: Any) -> str:
    is_flat = "name" in value and "function" not in value if isinstance(value, dict) else hasattr(value, "name")
    return "nested" if not is_flat else "flat custom" if field_of(value, "type") == "custom" else "flat function"


AnyTool = Annotated[
    Annotated[ChatTool, Tag("nested")]
    | Annotated[FlatFunction, Tag("flat function")]
    | Annotated[FlatCustom, Tag("flat custom")],
    Discriminator(_tool_form),
]


class ToolName(ChatWire):
    name: str


class NamedToolChoice(ChatWire):
    """The choice of one tool; in the flat form of tools, its name is next to `type`."""

    extras: ClassVar[ExtraFields | None] = {"custom": Refused("Write `name` beside `type`.")}
    type: Literal["function", "custom"]
    function: ToolName | None = None
    name: str | None = None


class AllowedTools(ChatWire):
    mode: str
    tools: Items[dict[str, Any]]


class AllowedToolChoice(ChatWire):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class StreamOptions(ChatWire):
    extras = STREAM_OPTION_FIELDS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with `include_usage`: every chunk has the usage so far


class StructuredOutputs(ChatWire):
    """One kind of guide; the other fields are absent."""

    extras: ClassVar[ExtraFields | None] = {
        "disable_fallback": Ignored("there is no fallback"),
        "disable_any_whitespace": Ignored("white space is always bounded"),
    }
    json_: Any = Field(default=None, alias="json")
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: TagField | None = None
    enable_in_reasoning: Any = None

    def by_name(self) -> dict[str, Any]:
        """Return the fields under the names that clients write."""
        return {name.removesuffix("_"): value for name, value in vars(self).items()}


class Prediction(ChatWire):
    """A text that much of the reply is expected to repeat, such as the file that it changes."""

    type: Literal["content"]
    content: str | Items[TextContent]


class ProcessorOptions(ChatWire):
    fps: FPS | None = None


class SearchLocation(ChatWire):
    type: Literal["approximate"]
    approximate: UserLocation


class SearchOptions(ChatWire):
    search_context_size: ContextSize | None = None
    user_location: SearchLocation | None = None


# Bodies


class GenerationBody(Body, OpenAIFields):
    """Fields of both endpoints."""

    extras = BODY_FIELDS
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit = Field(default=None, description="Up to the context window if left out or -1.")
    logit_bias: Annotated[dict[str, float], AtMost(MAX_LOGIT_BIAS)] | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    response_format: ChatFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = Field(
        default=None, description="The same as `structured_outputs.json`."
    )
    guided_regex: str | None = Field(default=None, description="The same as `structured_outputs.regex`.")
    guided_choice: Items[str] | None = Field(default=None, description="The same as `structured_outputs.choice`.")
    guided_grammar: str | None = Field(default=None, description="The same as `structured_outputs.grammar`.")
    thinking_token_budget: Any = Field(default=None, description="Limit of reasoning tokens; -1: no limit.")


class ChatCompletionBody(GenerationBody):
    extras = CHAT_FIELDS
    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenLimit = Field(default=None, description="Takes precedence over `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Items[AnyTool] | None = None
    tool_choice: str | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    prediction: Prediction | None = Field(
        default=None,
        description="A text that the reply may repeat: these tokens come sooner, and the reply stays the same.",
    )
    web_search_options: SearchOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    extras = COMPLETION_FIELDS
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: EchoLimit = Field(default=None, description="As for chats; 0 with `echo`: the prompt alone.")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="The text behind the reply; an empty one counts as absent.")
    best_of: int | None = None


_NAMED_OTHERWISE = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def _refusal(name: str) -> Refused:
    if name == "messages":
        return Refused("It is empty: leave it out.", beside="input")
    if name in _NAMED_OTHERWISE:
        return Refused(f"Its name is `{_NAMED_OTHERWISE[name]}` there.", beside="input")
    return Refused("It belongs to a body with `messages`.", beside="input")


_CHAT_FIELDS = [name for name in ChatCompletionBody.model_fields if name not in ResponsesBody.model_fields]
_AS_CHAT_FIELDS: ExtraFields = {**RESPONSES_FIELDS, **{name: _refusal(name) for name in _CHAT_FIELDS}}


class ResponsesAsChatBody(ResponsesBody):
    """The form of Responses, answered as a chat completion: Cursor sends it to any server that its user sets."""

    extras = _AS_CHAT_FIELDS
    stream_options: StreamOptions | None = None
