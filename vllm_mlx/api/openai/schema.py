"""Wire types of requests: chat completions and completions. What a field means is decided in `decode`.

Strict: a float is no integer, a bool is no number. Fields that no type names are looked up in `fields`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...core.request import MAX_CACHE_SALT, MAX_LOGIT_BIAS, MAX_LOGPROBS
from ..images import Detail
from ..items import AtMost, Items

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Wire(BaseModel):
    """Extra fields are kept for `fields` to judge, so that none is dropped unseen."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


# Messages


class WireText(Wire):
    type: Literal["text"]
    text: str


class WireRefusal(Wire):
    type: Literal["refusal"]
    refusal: str


class WireImageURL(Wire):
    url: str
    detail: Detail | None = None


class WireImage(Wire):
    type: Literal["image_url"]
    image_url: WireImageURL | str


FPS = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class WireVideoURL(Wire):
    url: str


class WireVideo(Wire):
    type: Literal["video_url"]
    video_url: WireVideoURL | str
    fps: FPS | None = None


class WireFrames(Wire):
    """A video as its frames, as Qwen's own tools write it."""

    type: Literal["video"]
    video: Items[str] = Field(min_length=1)
    fps: FPS | None = None


UserPart = Annotated[WireText | WireImage | WireVideo | WireFrames, Field(discriminator="type")]
AssistantPart = Annotated[WireText | WireRefusal, Field(discriminator="type")]


class WireFunctionCall(Wire):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class WireToolCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: WireFunctionCall


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: str | Items[WireText]
    name: str | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: str | Items[UserPart]
    name: str | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: str | Items[AssistantPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[WireToolCall] | None = None
    name: str | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: str | Items[UserPart]
    tool_call_id: str
    name: str | None = None


WireMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# Tools


class WireFunction(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireTool(Wire):
    type: Literal["function"]
    function: WireFunction


class WireToolName(Wire):
    name: str


class WireNamedTool(Wire):
    type: Literal["function"]
    function: WireToolName


class StreamOptions(Wire):
    include_usage: bool | None = None


class WireProcessorOptions(Wire):
    fps: FPS | None = None


# Bodies


class GenerationBody(Wire):
    """What both endpoints take."""

    model: str | None = Field(default=None, description="A name from /v1/models; the served model if left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="Up to the context window if left out.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: off.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], AtMost(MAX_LOGIT_BIAS)] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_CACHE_SALT)
    cache_reasoning_tokens: bool | None = Field(default=None, description="True keeps the whole reply cached.")
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = Field(default=None, description="As `structured_outputs.json`.")
    guided_regex: str | None = Field(default=None, description="As `structured_outputs.regex`.")
    guided_choice: Items[str] | None = Field(default=None, description="As `structured_outputs.choice`.")
    guided_grammar: str | None = Field(default=None, description="As `structured_outputs.grammar`.")
    thinking_token_budget: Any = Field(default=None, description="Tokens of a thought; -1: no bound.")


class ChatCompletionBody(GenerationBody):
    messages: Items[WireMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Goes before `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Items[WireTool] | None = None
    tool_choice: str | WireNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: WireProcessorOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
