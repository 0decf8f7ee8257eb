"""Request parameters that mean the same in several protocols: their wire fields, and what they become in a Request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import Field

from ..core.errors import InvalidParameter, Unsupported
from ..core.messages import DocumentPart, ImagePart, TextPart, ToolChoice, ToolSpec
from ..core.request import MAX_CACHE_SALT, RESERVED_TEMPLATE_KWARGS, SamplingParams, check_budget
from .text import CUSTOM_INPUT, decode_arguments
from .wire import ExtraFields, Ignored, Refused, Wire

Detail = Literal["auto", "low", "high", "original"]
LOW_DETAIL_SIDE = 512  # pixels
MAX_TEMPLATE_KWARGS = 16
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class PromptFields(Wire):
    """Fields of every request that has a prompt."""

    model: str | None = Field(default=None, description="A name from /v1/models; the served model if left out.")
    cache_salt: str | None = Field(default=None, max_length=MAX_CACHE_SALT)


class GenerationFields(PromptFields):
    """Fields of every request that generates a reply."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: off.")
    cache_reasoning_tokens: bool | None = Field(
        default=None, description="True keeps the complete reply cached. False: only what the next turn contains."
    )


class OpenAIFields(GenerationFields):
    """Fields of OpenAI's three endpoints."""

    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


CACHE_HINT = Ignored("a hint; the prefix cache finds every prefix by itself")
OPENAI_EXTRAS: ExtraFields = {  # rules for fields of these endpoints that the types do not declare
    "user": Ignored("names the end user for abuse reports"),
    "safety_identifier": Ignored("names the end user for abuse reports"),
    "service_tier": Ignored("there is one tier", ("auto", "default"), "This server has one tier: use 'auto'."),
    "prompt_cache_key": Ignored("a routing hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_retention": Ignored("a hint; the prefix cache keeps what memory allows"),
    "prompt_cache_options": CACHE_HINT,
    "modalities": Ignored("replies are text", (["text"],), "This server replies with text only."),
    "moderation": Refused("This server does not moderate."),
}

_SAMPLING_FIELDS = (  # a null stands for the default
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "thinking_token_budget",
)  # fmt: skip


def decode_sampling(body: GenerationFields, **own: Any) -> SamplingParams:
    """`own` are the parameters that the protocol writes in its own way. Raises InvalidParameter, naming the field."""
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    return SamplingParams(top_k=0 if body.top_k == -1 else body.top_k, **given, **own)


class ThinkingParameters(TypedDict):
    """Fields of `core.request.Request`."""

    thinking: Literal["auto", "on", "off"]
    thinking_limit: int | None
    template_kwargs: Mapping[str, Any]
    fills_content: bool | None


def decode_thinking(effort: str | None, template_kwargs: Mapping[str, Any] | None) -> ThinkingParameters:
    """`enable_thinking` inside `chat_template_kwargs` takes precedence over the effort; the template sees both."""
    kwargs: dict[str, Any] = dict(template_kwargs or {})
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"`chat_template_kwargs` has {len(kwargs)} entries, at most {MAX_TEMPLATE_KWARGS} are allowed."
        raise InvalidParameter(f"{message} Send only what the chat template reads.", param="chat_template_kwargs")
    for name in sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise Unsupported(
            f"`chat_template_kwargs.{name}` is not supported: the server sets it. "
            "If there is a request field with this meaning, use the request field.",
            param=f"chat_template_kwargs.{name}",
        )
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return {
        "thinking": _is_enabled(kwargs, effort),
        "thinking_limit": _budget_in(kwargs),
        "template_kwargs": kwargs,
        "fills_content": _flag_in(kwargs, "force_nonempty_content"),
    }


def _is_enabled(kwargs: Mapping[str, Any], effort: str | None) -> Literal["auto", "on", "off"]:
    enabled = _flag_in(kwargs, "enable_thinking")
    if enabled is None:
        if effort is None:
            return "auto"
        enabled = effort != "none"
    return "on" if enabled else "off"


def _flag_in(template_kwargs: Mapping[str, Any], name: str) -> bool | None:
    flag: bool | None = template_kwargs.get(name)
    if flag is not None and not isinstance(flag, bool):
        path = f"chat_template_kwargs.{name}"
        raise InvalidParameter(f"`{path}` must be true or false.", param=path)
    return flag


def _budget_in(template_kwargs: Mapping[str, Any]) -> int | None:
    """A reasoning budget that a client put among the template's arguments; None: there is none, or it is unlimited."""
    for name in ("thinking_token_budget", "thinking_budget"):
        budget: int | None = template_kwargs.get(name)
        check_budget(budget, f"chat_template_kwargs.{name}")
        if budget is not None:
            return None if budget == -1 else budget
    return None


class TextInput(Wire):
    """The input of a custom tool."""

    extras: ClassVar[ExtraFields | None] = {}
    type: Literal["text"]


class GrammarInput(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    type: Literal["grammar"]
    syntax: str
    definition: str


CustomInput = Annotated[TextInput | GrammarInput, Field(discriminator="type")]


def custom_parameters(format_: CustomInput | None) -> dict[str, Any]:
    """A tool that takes one text is to the model a function with one argument."""
    text = {"type": "string"}
    if isinstance(format_, GrammarInput):
        text["description"] = f"Text that follows this {format_.syntax} grammar:\n{format_.definition}"
    return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


def past_arguments(arguments: str | dict[str, Any] | None, *, is_custom: bool) -> dict[str, Any]:
    """The arguments of a past call. The call of a custom tool may come back with its text in place of arguments."""
    decoded = decode_arguments(arguments)
    if is_custom and isinstance(arguments, str) and CUSTOM_INPUT not in decoded:
        return {CUSTOM_INPUT: arguments}
    return decoded


def required_name(name: str | None, path: str) -> str:
    """The name of the tool at `path`. Raises InvalidParameter if it has none."""
    if not name:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    return name


def named_choice(
    name: str | None, tools: Iterable[ToolSpec], *, param: str = "tool_choice", refusal: str = ""
) -> ToolChoice:
    """The choice to call this tool. Raises InvalidParameter, in the words of `refusal`, if `tools` lacks it."""
    if name not in {tool.name for tool in tools}:
        raise InvalidParameter(refusal or f"`{param}` names none of the `tools`.", param=param)
    return ToolChoice("required", name)


def decode_file(url: str, name: str | None, *, param: str) -> Sequence[TextPart | DocumentPart]:
    """The document, after its name."""
    return (*((TextPart(f"{name}\n"),) if name else ()), DocumentPart(url, param=param))


def decode_file_data(
    data: str | None, file_id: str | None, name: str | None, path: str
) -> Sequence[TextPart | DocumentPart]:
    """`data`: a data URL, or its base64 alone."""
    if file_id is not None:
        raise Unsupported(f"`{path}`: this server keeps no files. Send the content as `file_data`.", param=path)
    if data is None:
        message = f"`{path}` has no content. Send it as `file_data`."
        raise InvalidParameter(message, param=path, code="missing_required_parameter")
    is_url = data[:5].lower() == "data:"
    return decode_file(data if is_url else f"data:;base64,{data}", name, param=f"{path}.file_data")


def decode_image(url: str, detail: Detail | None, *, param: str) -> ImagePart:
    """`low` shrinks the image to a square of `LOW_DETAIL_SIDE`. Otherwise the model's own processor sets the size."""
    return ImagePart(url, max_side=LOW_DETAIL_SIDE if detail == "low" else None, param=param)
