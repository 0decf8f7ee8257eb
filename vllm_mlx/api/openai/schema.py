"""Wire types of requests: chat completions and completions. What a field means is decided in `decode`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ..parameters import Detail, OpenAIFields, ReasoningEffort
from ..wire import AtMost, Body, ExtraFields, Items, Wire
from .fields import (
    BODY_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    STREAM_OPTION_FIELDS,
    TOOL_CALL_FIELDS,
    TOOL_FIELDS,
)


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
    type: Literal["text"]
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


UserPart = Annotated[TextContent | ImageContent | VideoContent | FramesContent, Field(discriminator="type")]
AssistantPart = Annotated[TextContent | RefusalContent, Field(discriminator="type")]


class CalledFunction(ChatWire):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class ChatToolCall(ChatWire):
    extras = TOOL_CALL_FIELDS
    id: str = Field(min_length=1)
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
    tool_calls: Items[ChatToolCall] | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: str | Items[UserPart]
    tool_call_id: str


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# Tools


class ChatFunction(ChatWire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(ChatWire):
    extras = TOOL_FIELDS
    type: Literal["function"]
    function: ChatFunction


class ToolName(ChatWire):
    name: str


class NamedToolChoice(ChatWire):
    type: Literal["function"]
    function: ToolName


class StreamOptions(ChatWire):
    extras = STREAM_OPTION_FIELDS
    include_usage: bool | None = None


class ProcessorOptions(ChatWire):
    fps: FPS | None = None


# Bodies


class GenerationBody(Body, OpenAIFields):
    """Fields of both endpoints."""

    extras = BODY_FIELDS
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="Up to the context window if left out.")
    logit_bias: Annotated[dict[str, float], AtMost(MAX_LOGIT_BIAS)] | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = Field(
        default=None, description="The same as `structured_outputs.json`."
    )
    guided_regex: str | None = Field(default=None, description="The same as `structured_outputs.regex`.")
    guided_choice: Items[str] | None = Field(default=None, description="The same as `structured_outputs.choice`.")
    guided_grammar: str | None = Field(default=None, description="The same as `structured_outputs.grammar`.")
    thinking_token_budget: Any = Field(default=None, description="Limit of reasoning tokens; -1: no limit.")


class ChatCompletionBody(GenerationBody):
    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Takes precedence over `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Items[ChatTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
