"""Request parameters with the same meaning in several protocols: their wire fields, and their fields in a Request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypedDict, TypeGuard, TypeVar

from pydantic import BeforeValidator, Field

from ..core.encoding import Task
from ..core.errors import InvalidParameter, Unsupported
from ..core.messages import DocumentPart, ImagePart, Message, Part, TextPart, ToolChoice, ToolSpec
from ..core.request import MAX_CACHE_SALT, RESERVED_TEMPLATE_KWARGS, Request, SamplingParams, check_budget
from .blocks import ReasoningMode
from .search import SearchTool
from .text import CUSTOM_INPUT, decode_arguments
from .wire import ExtraFields, Ignored, Refused, Wire

Detail = Literal["auto", "low", "high", "original"]
LOW_DETAIL_SIDE = 512  # pixels
MAX_TEMPLATE_KWARGS = 16
BILLING_HEADER = "x-anthropic-billing-header:"
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The form of a reply. `left_out`: paths and types of the tools that the model does not see."""

    reply_id: str
    model: str
    stream: bool = False
    search: SearchTool | None = None
    left_out: tuple[str, ...] = ()

    @property
    def reasoning(self) -> ReasoningMode:
        return "separate"


S = TypeVar("S", bound=Spec | None, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded(Generic[S]):
    """A decoded body: a request for each prompt, and the form in which the client wants the reply."""

    requests: tuple[Request, ...]
    reply: S

    @property
    def request(self) -> Request:
        """Return the request of a body with one prompt."""
        [request] = self.requests
        return request


class PromptFields(Wire):
    """Fields of every request that has a prompt."""

    task: ClassVar[Task] = "chat"  # of the models that serve it
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


def _unlimited(value: Any) -> Any:
    return None if value == -1 and type(value) is int else value


TokenLimit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_unlimited)]  # None and -1: the context
EchoLimit = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_unlimited)]
CACHE_HINT = Ignored("a hint; the prefix cache finds every prefix by itself")
OPENAI_EXTRAS: ExtraFields = {  # rules for fields of these endpoints that the types do not declare
    "user": Ignored("names the end user for abuse reports"),
    "safety_identifier": Ignored("names the end user for abuse reports"),
    "service_tier": Ignored("there is one tier"),
    "prompt_cache_key": Ignored("a routing hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_retention": Ignored("a hint; the prefix cache keeps what memory allows"),
    "prompt_cache_options": CACHE_HINT,
    "modalities": Ignored("replies are text", (["text"],), "This server replies with text only."),
    "priority": Ignored("it is the default", (0,), "Keys take turns; the requests of one key are served in order."),
    "moderation": Refused("This server does not moderate."),
}

_NAMES = frozenset(each.name for each in fields(SamplingParams))


def decode_sampling(body: GenerationFields, **own: Any) -> SamplingParams:
    """Decode each field with the name of a sampling parameter; a null means the default.

    `own`: the parameters that this protocol writes in its own way. Raises InvalidParameter.
    """
    given = {key: value for key in _NAMES & type(body).model_fields.keys() if (value := getattr(body, key)) is not None}
    return SamplingParams(**given | {"top_k": 0 if body.top_k == -1 else body.top_k} | own)


class ThinkingParameters(TypedDict):
    """Fields of `core.request.Request`."""

    thinking: Literal["auto", "on", "off"]
    thinking_limit: int | None
    template_kwargs: Mapping[str, Any]
    fills_content: bool | None


def decode_thinking(effort: str | None, template_kwargs: Mapping[str, Any] | None) -> ThinkingParameters:
    """Decode the fields of reasoning. `enable_thinking` takes precedence over the effort; the template sees both."""
    kwargs: dict[str, Any] = dict(template_kwargs or {})
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"`chat_template_kwargs` has {len(kwargs)} entries, at most {MAX_TEMPLATE_KWARGS} are allowed."
        raise InvalidParameter(f"{message} Send only names that the chat template reads.", param="chat_template_kwargs")
    for name in sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise Unsupported(
            f"`chat_template_kwargs.{name}` is not supported: the server sets it. "
            "If there is a request field with this meaning, use the request field.",
            param=f"chat_template_kwargs.{name}",
        )
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    enabled = _flag_in(kwargs, "enable_thinking")
    if enabled is None and effort is not None:
        enabled = effort != "none"
    return {
        "thinking": "auto" if enabled is None else "on" if enabled else "off",
        "thinking_limit": _budget_in(kwargs),
        "template_kwargs": kwargs,
        "fills_content": _flag_in(kwargs, "force_nonempty_content"),
    }


def _flag_in(template_kwargs: Mapping[str, Any], name: str) -> bool | None:
    flag: bool | None = template_kwargs.get(name)
    if flag is not None and not isinstance(flag, bool):
        path = f"chat_template_kwargs.{name}"
        raise InvalidParameter(f"`{path}` must be true or false.", param=path)
    return flag


def _budget_in(template_kwargs: Mapping[str, Any]) -> int | None:
    """Return the budget that a client put among the template's arguments, or None for no or an unlimited budget."""
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
    """Return the parameters of a tool that takes one text. To the model it is a function with one argument."""
    text = {"type": "string"}
    if isinstance(format_, GrammarInput):
        text["description"] = f"Text that follows this {format_.syntax} grammar:\n{format_.definition}"
    return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


def past_arguments(arguments: str | dict[str, Any] | None, *, is_custom: bool) -> dict[str, Any]:
    """Return the arguments of a past call. A custom tool's call may come back with its text as arguments."""
    decoded = decode_arguments(arguments)
    if is_custom and isinstance(arguments, str) and CUSTOM_INPUT not in decoded:
        return {CUSTOM_INPUT: arguments}
    return decoded


def required_name(name: str | None, path: str) -> str:
    """Return the name of the tool at `path`. Raises InvalidParameter if it has none."""
    if not name:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    return name


def allowed_choice(
    mode: str | None, tools: Iterable[Mapping[str, Any]], known: Iterable[ToolSpec], *, param: str
) -> ToolChoice:
    """Return the choice among some of the tools, which stay in the prompt. Raises InvalidParameter for an unknown one.

    `tools` name them in the nested form of chat completions or in the flat form of Responses.
    """
    forms = (inner if isinstance(inner := tool.get("function"), dict) else tool for tool in tools)
    names = [str(form.get("name")) for form in forms]
    if mode not in ("auto", "required"):
        raise InvalidParameter(f"`{param}.mode` must be 'auto' or 'required'.", param=f"{param}.mode")
    if not names or not {spec.name for spec in known}.issuperset(names):
        raise InvalidParameter(f"`{param}.tools` must name some of the `tools`.", param=f"{param}.tools")
    return ToolChoice("auto" if mode == "auto" else "required", names=frozenset(names))


def named_choice(
    name: str | None, tools: Iterable[ToolSpec], *, param: str = "tool_choice", refusal: str = ""
) -> ToolChoice:
    """Return the choice to call this tool. Raises InvalidParameter, in the words of `refusal`, if `tools` lacks it."""
    if name not in {tool.name for tool in tools}:
        raise InvalidParameter(refusal or f"`{param}` names none of the `tools`.", param=param)
    return ToolChoice("required", name)


def decode_file(url: str, name: str | None, *, param: str) -> Sequence[TextPart | DocumentPart]:
    """Return the document, preceded by its name."""
    return (*((TextPart(f"{name}\n"),) if name else ()), DocumentPart(url, param=param))


def decode_file_data(
    data: str | None, file_id: str | None, name: str | None, path: str
) -> Sequence[TextPart | DocumentPart]:
    """Decode a file of a message. `data` is a data URL, or its base64 alone."""
    if file_id is not None:
        raise Unsupported(f"`{path}`: this server keeps no files. Send the content as `file_data`.", param=path)
    if data is None:
        message = f"`{path}` has no content. Send it as `file_data`."
        raise InvalidParameter(message, param=path, code="missing_required_parameter")
    is_url = data[:5].lower() == "data:"
    return decode_file(data if is_url else f"data:;base64,{data}", name, param=f"{path}.file_data")


def decode_image(url: str, detail: Detail | None, *, param: str) -> ImagePart:
    """Return the image: as a square of `LOW_DETAIL_SIDE` for `low`, else in the size that the processor sets."""
    return ImagePart(url, max_side=LOW_DETAIL_SIDE if detail == "low" else None, param=param)


def without_client_marks(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages without the line that Claude Code adds for billing: it differs between requests.

    Its block is dropped with it if nothing else is in it.
    """
    return tuple(kept for message in messages if (kept := _without_billing(message)) is not None)


def _without_billing(message: Message) -> Message | None:
    if message.role != "system" or not any(map(_is_billed, message.parts)):
        return message
    parts: list[Part] = []
    for part in message.parts:
        if not _is_billed(part):
            parts.append(part)
        elif rest := part.text.partition("\n")[2]:
            parts.append(TextPart(rest))
    return replace(message, parts=tuple(parts)) if parts else None


def _is_billed(part: Part) -> TypeGuard[TextPart]:
    return isinstance(part, TextPart) and part.text.startswith(BILLING_HEADER)
