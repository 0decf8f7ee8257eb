"""Request bodies → core Requests, and how the client wants the reply written. Every field is honoured or refused."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import (
    ImagePart,
    MediaPart,
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
from ...core.request import Guide, Request, SamplingParams
from ...media.parts import media_parts, replace_media
from ..blocks import ReasoningMode
from ..guides import decode_format, decode_guide, decode_structured_outputs, one_guide
from ..parameters import decode_image, decode_sampling, decode_thinking, named_choice
from ..quirks import without_client_marks
from ..text import decode_arguments
from . import schema

_NO_SUCH_TOOL = "The tool specified in `tool_choice` does not match any of the specified `tools`."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec:
    """How the reply is written. `created` is in unix seconds."""

    reply_id: str
    model: str
    created: int
    num_prompts: int = 1
    choices_per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    reasoning: ReasoningMode = "separate"

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.choices_per_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """There is one request for each prompt; choices are numbered prompt by prompt."""

    requests: tuple[Request, ...]
    reply: ReplySpec


def decode_chat(
    body: schema.ChatCompletionBody, *, reply_id: str, model: str, created: int, separate_reasoning: bool = True
) -> Decoded:
    """`separate_reasoning` is the server's default for requests without that field."""
    _check_chat(body)
    request = _chat_request(body, reply_id)
    reply = ReplySpec(
        reply_id=reply_id,
        model=model,
        created=created,
        choices_per_prompt=request.sampling.n,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        logprobs=bool(body.logprobs),
        reasoning=_reasoning_mode(body, separate_reasoning),
    )
    return Decoded(requests=(with_options(request, body.mm_processor_kwargs),), reply=reply)


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
    return Request(
        request_id=request_id,
        messages=without_client_marks(decode_messages(body.messages)),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        max_tool_calls=1 if body.parallel_tool_calls is False else None,
        sampling=_sampling(
            body,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        add_generation_prompt=_add_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        cache_reasoning="keep" if body.cache_reasoning_tokens else None,
        cache_salt=body.cache_salt or "",
        **decode_thinking(body.reasoning_effort, body.chat_template_kwargs),
    )


def decode_completion(body: schema.CompletionBody, *, reply_id: str, model: str, created: int) -> Decoded:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported("`best_of` other than `n` is not supported.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise Unsupported("`echo` together with `logprobs` is not supported yet.", param="echo")
    prompts = _prompts(body.prompt)
    sampling = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    requests = tuple(
        Request(
            request_id=reply_id if len(prompts) == 1 else f"{reply_id}-{number}",
            prompt=prompt,
            sampling=sampling,
            echo=bool(body.echo),
            cache_salt=body.cache_salt or "",
        )
        for number, prompt in enumerate(prompts)
    )
    reply = ReplySpec(
        reply_id=reply_id,
        model=model,
        created=created,
        num_prompts=len(prompts),
        choices_per_prompt=sampling.n,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
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
    older_fields = ((kind, getattr(body, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar"))
    return one_guide(
        decode_format(body.response_format, "response_format"),
        decode_structured_outputs(body.structured_outputs),
        *(decode_guide(kind, value, f"guided_{kind}") for kind, value in older_fields if value is not None),
    )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise InvalidParameter(f"Keys of `logit_bias` must be token ids, got '{shown(key)}'.", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _include_usage(body: schema.GenerationBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidParameter("Stream options can only be defined when `stream=True`.", param="stream_options")
    return bool(options.include_usage)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """The prompts of a field that is one text, several texts, one list of ids, or several lists of ids."""
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
    if body.tools == []:
        raise InvalidParameter(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    return decode_tools(body.tools or ())


def _tool_choice(body: schema.ChatCompletionBody, tools: tuple[ToolSpec, ...]) -> ToolChoice:
    match body.tool_choice:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "none":
            return ToolChoice("none")
        case "auto":
            _need_tools(tools)
            return ToolChoice("auto")
        case "required":
            _need_tools(tools)
            return ToolChoice("required")
        case schema.NamedToolChoice() as named:
            _need_tools(tools)
            return named_choice(named.function.name, tools, refusal=_NO_SUCH_TOOL)
        case other:
            raise InvalidParameter(
                f"Invalid value for `tool_choice`: {shown(other)}! Only named tools, 'none', 'auto' or 'required' are "
                "supported.",
                param="tool_choice",
            )


def _need_tools(tools: tuple[ToolSpec, ...]) -> None:
    if not tools:
        raise InvalidParameter("When using `tool_choice`, `tools` must be set.", param="tool_choice")


def _add_generation_prompt(body: schema.ChatCompletionBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _reasoning_mode(body: schema.ChatCompletionBody, separate_by_default: bool) -> ReasoningMode:
    if body.include_reasoning is False:
        return "hidden"
    separate = separate_by_default if body.separate_reasoning is None else body.separate_reasoning
    return "separate" if separate else "inline"


AnyMessage = schema.SystemMessage | schema.UserMessage | schema.AssistantMessage | schema.ToolMessage
AnyPart = schema.TextContent | schema.RefusalContent | schema.ImageContent | schema.VideoContent | schema.FramesContent


def decode_messages(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Messages in their order, with their whitespace. A tool result has the name of the latest call with its id."""
    tool_names: dict[str, str] = {}
    decoded = []
    for number, message in enumerate(messages):
        path = f"messages[{number}]."
        match message:
            case schema.SystemMessage():
                decoded.append(_message("system", _parts(message.content, path), message.name))
            case schema.UserMessage():
                decoded.append(_message("user", _parts(message.content, path), message.name))
            case schema.AssistantMessage():
                calls = _tool_calls(message.tool_calls or ())
                tool_names.update((call.call_id, call.name) for call in calls)
                decoded.append(_message("assistant", (*_assistant_parts(message, path), *calls), message.name))
            case schema.ToolMessage():
                name = tool_names.get(message.tool_call_id, message.name)
                result = ToolResultPart(message.tool_call_id, _parts(message.content, path), name)
                decoded.append(Message("tool", (result,)))
    return tuple(decoded)


def decode_tools(tools: Iterable[schema.ChatTool]) -> tuple[ToolSpec, ...]:
    return tuple(
        ToolSpec(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
            param=f"tools[{number}].function.parameters",
        )
        for number, tool in enumerate(tools)
    )


def _message(role: Any, parts: Sequence[Part], name: str | None) -> Message:
    return Message(role, tuple(parts), name)


def _parts(content: str | Sequence[AnyPart] | None, path: str) -> tuple[ShownPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{path}content[{number}].") for number, part in enumerate(content))


def _part(part: AnyPart, path: str) -> ShownPart:
    match part:
        case schema.TextContent(text=text) | schema.RefusalContent(refusal=text):
            return TextPart(text)
        case schema.ImageContent(image_url=image):
            return _image(image, path)
        case schema.VideoContent():
            return _video(part, path)
        case schema.FramesContent():
            return VideoPart(tuple(part.video), fps=part.fps, param=f"{path}video")


def _image(image: schema.ImageURL | str, path: str) -> ImagePart:
    """Some clients send the address itself where the object with the address belongs."""
    if isinstance(image, str):
        return decode_image(image, None, param=f"{path}image_url")
    return decode_image(image.url, image.detail, param=f"{path}image_url")


def _assistant_parts(message: schema.AssistantMessage, path: str) -> list[Part]:
    """Reasoning, then text. The reasoning has two names; a client that sends both sends the same text twice."""
    parts: list[Part] = []
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        parts.append(ReasoningPart(reasoning))
    if message.content is None and message.refusal:
        parts.append(TextPart(message.refusal))
    return [*parts, *_parts(message.content, path)]


def _tool_calls(calls: Iterable[schema.ChatToolCall]) -> list[ToolCallPart]:
    return [ToolCallPart(call.id, call.function.name, decode_arguments(call.function.arguments)) for call in calls]


def _video(part: schema.VideoContent, path: str) -> VideoPart:
    """Some clients send the address itself where the object with the address belongs."""
    video = part.video_url
    return VideoPart(video if isinstance(video, str) else video.url, fps=part.fps, param=f"{path}video_url")


def with_options(request: Request, options: schema.ProcessorOptions | None) -> Request:
    """The frame rate that a request gives for all of its videos; a video may have its own."""
    if options is None:
        return request
    return replace_media(request, {part: _at(part, options.fps) for part in media_parts(request)})


def _at(part: MediaPart, fps: float | None) -> MediaPart:
    return replace(part, fps=fps) if isinstance(part, VideoPart) and part.fps is None else part
