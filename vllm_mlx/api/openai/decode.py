"""Request bodies → core Requests, and how the client wants the reply written. Every field is honoured or refused."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import (
    DocumentPart,
    Message,
    Part,
    ReasoningPart,
    ShownPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
    VideoPart,
)
from ...core.request import MAX_PROMPT_LOGPROBS, Guide, Request, SamplingParams
from ..blocks import ReasoningMode
from ..guides import decode_format, decode_guide, decode_structured_outputs, one_guide
from ..parameters import (
    Decoded,
    Spec,
    allowed_choice,
    custom_parameters,
    decode_file_data,
    decode_image,
    decode_sampling,
    decode_thinking,
    named_choice,
    past_arguments,
    without_client_marks,
)
from ..past_calls import PastCalls
from ..responses.decode import decode_part, decode_response
from ..responses.replies import ResponseSpec
from ..responses.schema import InputFile, InputImage
from ..search import NO_SEARCH, PAGES, SearchTool, search_spec, search_tool
from . import schema

_SEARCH_FIELD = "web_search_options"
_NO_SUCH_TOOL = "The tool specified in `tool_choice` does not match any of the specified `tools`."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec(Spec):
    """The form of chats and completions. `created`: unix seconds. Choices are numbered prompt by prompt."""

    created: int
    num_prompts: int = 1
    choices_per_prompt: int = 1
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk, for its choice
    logprobs: bool = False
    reasoning: ReasoningMode = "separate"
    custom_tools: frozenset[str] = frozenset()  # their calls carry one text instead of arguments

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.choices_per_prompt


def _form_of(body: Any) -> str:
    """Return the form of a body. With messages it is a chat, which refuses `input`. A null counts as absent."""
    if isinstance(body, dict):
        has_input = body.get("input") is not None and not body.get("messages")
        return "form of responses" if has_input else "form of chat"
    return "form of responses" if isinstance(body, schema.ResponsesAsChatBody) else "form of chat"


AnyChatBody = Annotated[
    Annotated[schema.ChatCompletionBody, Tag("form of chat")]
    | Annotated[schema.ResponsesAsChatBody, Tag("form of responses")],
    Discriminator(_form_of),
]


def decode_chat(
    body: schema.ChatCompletionBody, spec: ReplySpec, *, separate_reasoning: bool = True, searches: bool = False
) -> Decoded[ReplySpec]:
    """Decode a chat. `spec`: of the reply, so far without the client's wishes. `separate_reasoning`: the default of the
    server; `searches`: the server runs web searches.
    """
    _check_chat(body)
    search = _search(body, searches=searches)
    request = _chat_request(body, spec.reply_id)
    reply = replace(
        spec,
        choices_per_prompt=request.sampling.n,
        **_stream_fields(body.stream, body.stream_options),
        logprobs=bool(body.logprobs),
        reasoning=_reasoning_mode(separate_reasoning, separate=body.separate_reasoning, include=body.include_reasoning),
        custom_tools=custom_tools(body.tools),
        search=search,
    )
    return _decoded(request, reply)


def decode_responses_as_chat(
    body: schema.ResponsesAsChatBody, spec: ReplySpec, *, separate_reasoning: bool = True, searches: bool = False
) -> Decoded[ReplySpec]:
    """Decode like `decode_chat`. Nothing is stored, so fields that need a stored response are refused."""
    for name in ("store", "background", "previous_response_id"):
        if getattr(body, name):
            raise InvalidParameter(
                f"`{name}` needs stored responses: send this body to /v1/responses, or send the complete input "
                f"without `{name}`.",
                param=name,
            )
    stateless = body.model_copy(update={"store": False})
    asked = ResponseSpec(reply_id=spec.reply_id, model=spec.model, created_at=spec.created)
    found = decode_response(stateless, asked, searches=searches)
    reply = replace(
        spec,
        **_stream_fields(body.stream, body.stream_options),
        logprobs=found.request.sampling.logprobs is not None,
        reasoning=_reasoning_mode(separate_reasoning),
        custom_tools=found.reply.tools.custom,
        search=None if found.reply.search is None else replace(found.reply.search, is_shown=False),
        left_out=found.reply.left_out,
    )
    return _decoded(found.request, reply)


def _decoded(request: Request, reply: ReplySpec) -> Decoded[ReplySpec]:
    if reply.reasoning == "inline":
        request = replace(request, fills_content=False)  # all reasoning is content there
    return Decoded(requests=(request,), reply=reply)


def _search(body: schema.ChatCompletionBody, *, searches: bool) -> SearchTool | None:
    options = body.web_search_options
    if options is None:
        return None
    if not searches:
        raise Unsupported(NO_SEARCH, param=_SEARCH_FIELD)
    if (body.n or 1) > 1:
        raise Unsupported(f"`{_SEARCH_FIELD}` goes with one reply: leave `n` out.", param=_SEARCH_FIELD)
    found = search_tool(num_pages=PAGES[options.search_context_size or "medium"], param=_SEARCH_FIELD)
    return replace(found, is_shown=False)


def _check_chat(body: schema.ChatCompletionBody) -> None:
    """Refuse fields that contradict each other."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameter(
            "Set either `continue_final_message` or `add_generation_prompt` to true, not both.",
            param="continue_final_message",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")


def _chat_request(body: schema.ChatCompletionBody, request_id: str) -> Request:
    tools = _tools(body)
    options, adds_prompt = body.mm_processor_kwargs, body.add_generation_prompt
    fps = None if options is None else options.fps
    messages = decode_messages(body.messages, fps, custom_tools(body.tools))
    return Request(
        request_id=request_id,
        messages=without_client_marks(messages),
        tools=tools,
        prediction=_prediction(body.prediction),
        tool_choice=_tool_choice(body, tools),
        max_tool_calls=1 if body.parallel_tool_calls is False else None,
        sampling=_sampling(
            body,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        add_generation_prompt=not body.continue_final_message if adds_prompt is None else adds_prompt,
        continue_final_message=bool(body.continue_final_message),
        keeps_reasoning=body.cache_reasoning_tokens,
        cache_salt=body.cache_salt or "",
        **decode_thinking(body.reasoning_effort, body.chat_template_kwargs),
    )


def _prediction(prediction: schema.Prediction | None) -> str:
    if prediction is None:
        return ""
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def decode_completion(body: schema.CompletionBody, spec: ReplySpec) -> Decoded[ReplySpec]:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported("`best_of` other than `n` is not supported.", param="best_of")
    if body.suffix and body.echo:
        raise InvalidParameter("`echo` does not go with `suffix`: leave one of them out.", param="echo")
    prompts = _prompts(body.prompt)
    sampling = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    scores_prompt = bool(body.echo) and body.logprobs is not None
    requests = tuple(
        Request(
            request_id=spec.reply_id if len(prompts) == 1 else f"{spec.reply_id}-{number}",
            prompt=prompt,
            suffix=body.suffix or "",
            sampling=sampling,
            echo=bool(body.echo),
            max_prompt_logprobs=max(1, MAX_PROMPT_LOGPROBS // (len(prompts) * sampling.n)) if scores_prompt else 0,
            cache_salt=body.cache_salt or "",
        )
        for number, prompt in enumerate(prompts)
    )
    reply = replace(
        spec,
        num_prompts=len(prompts),
        choices_per_prompt=sampling.n,
        **_stream_fields(body.stream, body.stream_options),
        logprobs=body.logprobs is not None,
    )
    return Decoded(requests=requests, reply=reply)


def _sampling(body: schema.GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return decode_sampling(
        body,
        max_tokens=max_tokens,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        guide=_guide(body),
    )


def _guide(body: schema.GenerationBody) -> Guide | None:
    outputs = body.structured_outputs
    older_fields = ((kind, getattr(body, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar"))
    return one_guide(
        decode_format(body.response_format, "response_format"),
        decode_structured_outputs(None if outputs is None else outputs.by_name()),
        *(decode_guide(kind, value, f"guided_{kind}") for kind, value in older_fields if value is not None),
    )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise InvalidParameter(f"Keys of `logit_bias` must be token ids, got '{shown(key)}'.", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _stream_fields(stream: bool | None, options: schema.StreamOptions | None) -> dict[str, Any]:
    """Return the fields of `ReplySpec` that say whether to stream, and which chunks carry usage."""
    if options is None:
        return {"stream": bool(stream)}
    if not stream:
        raise InvalidParameter("Stream options can only be defined when `stream=True`.", param="stream_options")
    is_sent = bool(options.include_usage)
    continuous = is_sent and bool(options.continuous_usage_stats)
    return {"stream": True, "include_usage": is_sent, "continuous_usage": continuous}


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """Return the prompts of a field that is one text, several texts, one list of ids, or several lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameter("`prompt` must not be empty.", param="prompt")
    if isinstance(prompt[0], int):
        return [tuple(_token_ids(prompt))]
    return [item if isinstance(item, str) else tuple(_token_ids(item)) for item in prompt]


def _token_ids(ids: Any) -> list[int]:
    if not ids or min(ids) < 0:
        raise InvalidParameter("A `prompt` of token ids needs at least one id, and no negative ones.", param="prompt")
    return list(ids)


def _tools(body: schema.ChatCompletionBody) -> tuple[ToolSpec, ...]:
    """Return the client's own tools, and after them the web search."""
    tools, search = body.tools, body.web_search_options
    specs = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]
    if search is not None:
        place = None if search.user_location is None else search.user_location.approximate
        specs.append(search_spec(place, _SEARCH_FIELD))
    return tuple(specs)


def _tool(tool: schema.AnyTool, path: str) -> ToolSpec:
    if isinstance(tool, schema.FlatCustom):
        return ToolSpec(tool.name, tool.description, custom_parameters(tool.format), param=f"{path}.format")
    function, path = (tool.function, f"{path}.function") if isinstance(tool, schema.ChatTool) else (tool, path)
    return ToolSpec(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
        param=f"{path}.parameters",
    )


def custom_tools(tools: Sequence[schema.AnyTool] | None) -> frozenset[str]:
    """Return the names of the tools that take one text."""
    return frozenset(tool.name for tool in tools or () if isinstance(tool, schema.FlatCustom))


def _tool_choice(body: schema.ChatCompletionBody, tools: Sequence[ToolSpec]) -> ToolChoice:
    match choice := body.tool_choice:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "auto" if body.tools == []:
            return ToolChoice("none")
        case "none":
            return ToolChoice("none")
        case "auto" | "required" | schema.NamedToolChoice() | schema.AllowedToolChoice() if not tools:
            raise InvalidParameter("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        case "auto" | "required":
            return ToolChoice("auto" if choice == "auto" else "required")
        case schema.NamedToolChoice():
            name = choice.name if choice.function is None else choice.function.name
            return named_choice(name, tools, refusal=_NO_SUCH_TOOL)
        case schema.AllowedToolChoice(allowed_tools=allowed):
            return allowed_choice(allowed.mode, allowed.tools, tools, param="tool_choice.allowed_tools")
        case _:
            raise InvalidParameter(
                f"Invalid value for `tool_choice`: {shown(choice)}! Only named tools, 'none', 'auto' or 'required' are "
                "supported.",
                param="tool_choice",
            )


def _reasoning_mode(
    separate_by_default: bool, *, separate: bool | None = None, include: bool | None = None
) -> ReasoningMode:
    if include is False:
        return "hidden"
    return "separate" if (separate_by_default if separate is None else separate) else "inline"


def decode_messages(
    messages: Sequence[schema.ChatMessage], fps: float | None, custom: frozenset[str] = frozenset()
) -> tuple[Message, ...]:
    """Decode messages in their order, with their whitespace. A tool result has the name of the latest call with its id.

    `fps`: the frame rate of videos that give no rate. `custom`: names of tools that take one text.
    """
    past = PastCalls()
    decoded = []
    for number, message in enumerate(messages):
        parts = _parts(message.content, f"messages[{number}].", fps)
        match message:
            case schema.SystemMessage():
                decoded.append(Message("system", parts, message.name))
            case schema.UserMessage():
                decoded.append(Message("user", parts, message.name))
            case schema.AssistantMessage():
                calls = _tool_calls(message.tool_calls or (), custom, past)
                decoded.append(Message("assistant", (*_reasoning(message), *parts, *calls), message.name))
            case schema.ToolMessage(tool_call_id=call_id):
                call_id, name = past.answered(call_id, f"messages[{number}].tool_call_id")
                result = ToolResultPart(call_id, parts, message.name if name is None else name)
                decoded.append(Message("tool", (result,)))
    return tuple(decoded)


def _reasoning(message: schema.AssistantMessage) -> Iterator[Part]:
    """Return the reasoning, then a refusal if there is no content. Clients may send the reasoning under four names."""
    blocks = (*(message.reasoning_details or ()), *(message.thinking_blocks or ()))
    texts = [text for block in blocks for name in ("text", "thinking") if isinstance(text := block.get(name), str)]
    if reasoning := message.reasoning_content or message.reasoning or "".join(dict.fromkeys(texts)):
        yield ReasoningPart(reasoning)
    if message.content is None and message.refusal:
        yield TextPart(message.refusal)


def _tool_calls(calls: Sequence[schema.ChatToolCall], custom: frozenset[str], past: PastCalls) -> list[ToolCallPart]:
    return [
        ToolCallPart(past.add(call.id, name), name, past_arguments(call.function.arguments, is_custom=name in custom))
        for call in calls
        for name in [call.function.name]
    ]


def _parts(
    content: str | Sequence[schema.UserPart | schema.AssistantPart] | None, path: str, fps: float | None
) -> tuple[ShownPart | DocumentPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(sent for number, part in enumerate(content) for sent in _part(part, f"{path}content[{number}].", fps))


def _part(
    part: schema.UserPart | schema.AssistantPart, path: str, fps: float | None
) -> Sequence[ShownPart | DocumentPart]:
    match part:
        case schema.TextContent(text=text) | schema.RefusalContent(refusal=text):
            return (TextPart(text),)
        case InputImage() | InputFile():
            return decode_part(part, path.removesuffix("."))
        case schema.FileContent(file=file):
            return decode_file_data(file.file_data, file.file_id, file.filename, f"{path}file")
        case schema.ImageContent(image_url=image):
            detail = None if isinstance(image, str) else image.detail
            return (decode_image(_address(image), detail, param=f"{path}image_url"),)
        case schema.VideoContent(video_url=video):
            own_fps = fps if part.fps is None else part.fps
            return (VideoPart(_address(video), fps=own_fps, param=f"{path}video_url"),)
        case schema.FramesContent(video=frames):
            own_fps = fps if part.fps is None else part.fps
            return (VideoPart(tuple(frames), fps=own_fps, param=f"{path}video"),)


def _address(field: schema.ImageURL | schema.VideoURL | str) -> str:
    """Accept an address where the object with the address belongs, as some clients send it."""
    return field if isinstance(field, str) else field.url
