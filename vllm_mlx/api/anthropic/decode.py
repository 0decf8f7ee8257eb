"""Request bodies → core Requests, and how the client wants the reply written. Cache marks are dropped.

The prompt lists some tools at its start; others appear as text where the conversation names them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.events import FoundPage, SearchDone
from ...core.messages import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
)
from ...core.request import Guide, Request, SamplingParams, check_stop
from ..blocks import ReasoningMode
from ..guides import decode_format, one_guide
from ..parameters import Decoded, Spec, decode_file, decode_sampling, named_choice, required_name, without_client_marks
from ..past_calls import PastCalls
from ..search import (
    NO_SEARCH,
    SEARCH_ERRORS,
    SEARCH_NAME,
    SearchTool,
    result_part,
    search_spec,
    search_tool,
    split_searches,
)
from ..text import Unsealer
from . import schema

MIN_BUDGET_TOKENS = 1024

ThinkingBlocks = Literal["visible", "sealed", "hidden"]
ThinkingPolicy = Literal["asked", "always"]
AnyBlock = schema.UserBlock | schema.AssistantBlock | schema.SystemBlock | schema.ResultPart

MAX_INTRODUCED_CHARS = 16 * 1024 * 1024  # a short block may name a long definition repeatedly
_EMPTY_FILE = "data:text/plain,"  # it has the same answer as an empty file in base64

# Ids of tool calls: clients expect Anthropic's prefix, while the engine's own ids have OpenAI's.
_ENGINE_PREFIX, _WIRE_PREFIX, _SEARCH_PREFIX = "call_", "toolu_", "srvtoolu_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec(Spec):
    """The form of a message. Thinking blocks that are `sealed` are empty, and their signature holds the reasoning."""

    thinking: ThinkingBlocks = "visible"

    @property
    def reasoning(self) -> ReasoningMode:
        return "hidden" if self.thinking == "hidden" else "separate"


def decode_messages_request(
    body: schema.MessagesBody,
    spec: MessageSpec,
    *,
    messages_thinking: ThinkingPolicy = "asked",
    searches: bool = False,
) -> Decoded[MessageSpec]:
    """Decode a body. `spec`: of the reply, so far without the client's wishes. `messages_thinking`: the requests that
    get thinking blocks; `searches`: the server runs them.
    """
    if body.mcp_servers:
        raise Unsupported("This server calls no MCP servers; offer their tools through `tools`.", param="mcp_servers")
    _check_budget(body)
    stop = tuple(body.stop_sequences or ())
    check_stop("stop_sequences", stop)
    sampling = decode_sampling(body, max_tokens=body.max_tokens, stop=stop, guide=_guide(body))
    tools = Toolbox(body.tools or (), searches=searches)
    reply = replace(
        spec,
        stream=bool(body.stream),
        thinking=_thinking_blocks(body, messages_thinking),
        search=tools.search,
        left_out=tuple(tools.left_out),
    )
    request = replace(_request(body, tools, spec.reply_id, sampling), keeps_reasoning=body.cache_reasoning_tokens)
    return Decoded(requests=(request,), reply=reply)


def decode_count_request(body: schema.CountTokensBody, *, request_id: str, searches: bool = False) -> Decoded[None]:
    """Return the request whose prompt is counted: the request that /v1/messages makes from these fields."""
    request = _request(body, Toolbox(body.tools or (), searches=searches), request_id, SamplingParams())
    return Decoded(requests=(request,), reply=None)


def _request(body: schema.CountTokensBody, tools: "Toolbox", request_id: str, sampling: SamplingParams) -> Request:
    messages = _decode_conversation(body, tools)
    tool_choice, max_tool_calls = decode_tool_choice(body.tool_choice, tools)
    continues_reply = _ends_in_text(messages)
    effort = None if body.output_config is None else body.output_config.effort
    return Request(
        request_id=request_id,
        messages=messages,
        tools=tuple(tools.listed),
        unlisted_tools=tuple(tools.deferred),
        tool_choice=tool_choice,
        max_tool_calls=max_tool_calls,
        sampling=sampling,
        thinking=_thinking(body),
        thinking_limit=body.thinking.budget_tokens if isinstance(body.thinking, schema.ThinkingEnabled) else None,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        add_generation_prompt=not continues_reply,
        continue_final_message=continues_reply,
        cache_salt=body.cache_salt or "",
    )


def _ends_in_text(messages: Sequence[Message]) -> bool:
    """Return whether the client began the reply, which the model then continues."""
    if not messages or messages[-1].role != "assistant" or not messages[-1].parts:
        return False
    end = messages[-1].parts[-1]
    return isinstance(end, TextPart) and bool(end.text)


def _check_budget(body: schema.MessagesBody) -> None:
    if not isinstance(body.thinking, schema.ThinkingEnabled):
        return
    budget = body.thinking.budget_tokens
    if budget < MIN_BUDGET_TOKENS:
        raise InvalidParameter(
            f"`thinking.budget_tokens` must be at least {MIN_BUDGET_TOKENS}, got {shown(str(budget))}.",
            param="thinking.budget_tokens",
        )
    if budget >= body.max_tokens:
        raise InvalidParameter(
            "`thinking.budget_tokens` must be less than `max_tokens`.", param="thinking.budget_tokens"
        )


def _guide(body: schema.MessagesBody) -> Guide | None:
    config = None if body.output_config is None else body.output_config.format
    return one_guide(decode_format(config, "output_config.format"), decode_format(body.output_format, "output_format"))


def _thinking(body: schema.CountTokensBody) -> Literal["auto", "on", "off"]:
    kind = None if body.thinking is None else body.thinking.type
    return "on" if kind == "enabled" else "off" if kind == "disabled" else "auto"


def _thinking_blocks(body: schema.MessagesBody, policy: ThinkingPolicy) -> ThinkingBlocks:
    if policy == "asked" and (body.thinking is None or body.thinking.type == "disabled"):
        return "hidden"
    return "sealed" if body.thinking is not None and body.thinking.display == "omitted" else "visible"


class Toolbox:
    """The tools of a request, in its order: the prompt lists the `listed` ones at its start."""

    def __init__(self, tools: Iterable[schema.MessagesTool], *, searches: bool = False) -> None:
        """Read a body for a server; `searches`: the server runs web searches."""
        self.listed: list[ToolSpec] = []
        self.deferred: list[ToolSpec] = []
        self.search: SearchTool | None = None
        self.left_out: list[str] = []  # paths and types of tools that the model does not see
        for number, tool in enumerate(tools):
            path = f"tools[{number}]"
            if tool.is_web_search:
                _check_search_name(tool, path)
            if tool.is_run_by_anthropic and not (tool.is_web_search and searches):
                self.left_out.append(f"{path}.{tool.type}")
                continue
            spec = self._search_spec(tool, path) if tool.is_web_search else _spec(tool, path)
            (self.deferred if tool.defer_loading else self.listed).append(spec)
        self._texts: dict[str, str] = {}  # definitions that the conversation introduced, by name
        self._num_introduced = 0  # characters
        self._by_name = {spec.name: spec for spec in (*self.listed, *self.deferred)}

    def _search_spec(self, tool: schema.MessagesTool, path: str) -> ToolSpec:
        allowed, blocked = tool.allowed_domains or (), tool.blocked_domains or ()
        self.search = search_tool(max_uses=tool.max_uses, allowed=allowed, blocked=blocked, param=path)
        return replace(search_spec(tool.user_location, path), strict=bool(tool.strict))

    def introduce(self, name: str) -> str:
        """Return the text that introduces a tool into the conversation: its definition, as templates list tools."""
        spec = self._by_name.get(name)
        if spec is None:
            return f"The tool {name} is not available."
        if name not in self._texts:
            self._texts[name] = json.dumps(spec.to_openai(), ensure_ascii=False)
        self._num_introduced += len(self._texts[name])
        if self._num_introduced > MAX_INTRODUCED_CHARS:
            raise InvalidParameter(
                f"The definitions of the tools that the messages introduce have more than {MAX_INTRODUCED_CHARS} "
                "characters together, which is the maximum. Introduce each tool once.",
                param="messages",
            )
        return self._texts[name]

    def add(self, change: schema.ToolChange, path: str) -> str:
        if change.definition is not None:
            spec = _spec(change.definition, f"{path}.definition")
            self._by_name.setdefault(spec.name, spec)
            return self.introduce(spec.name)
        return self.introduce(_name(change, path))

    def remove(self, change: schema.ToolChange, path: str) -> str:
        return f"The tool {_name(change, path)} is no longer available."


def decode_tool_choice(choice: schema.MessagesToolChoice | None, tools: Toolbox) -> tuple[ToolChoice, int | None]:
    """Return the choice, and the maximum number of calls in one reply, which is None if any number is allowed.

    A request whose only or chosen tool is a web search that this server cannot run is refused. From other requests,
    that tool is left out.
    """
    is_about_search = not (tools.listed or tools.deferred) or (choice is not None and choice.name == SEARCH_NAME)
    if is_about_search and any(f".{SEARCH_NAME}" in path for path in tools.left_out):
        raise Unsupported(NO_SEARCH, param="tools")
    if choice is None:
        return ToolChoice("auto"), None
    most = 1 if choice.disable_parallel_tool_use else None
    match choice.type:
        case "any":
            if not (tools.listed or tools.deferred):
                raise InvalidParameter("`tool_choice` 'any' needs `tools`.", param="tool_choice")
            return ToolChoice("required"), most
        case "tool":
            offered = (*tools.listed, *tools.deferred)
            return named_choice(choice.name, offered, param="tool_choice.name"), most
        case mode:
            return ToolChoice(mode), most


def _spec(tool: schema.MessagesTool, path: str) -> ToolSpec:
    name, param = required_name(tool.name, path), f"{path}.input_schema"
    if tool.input_schema is None and (tool.type or "custom") == "custom":
        raise InvalidParameter(f"`{param}` is required.", param=param)
    return ToolSpec(name, tool.description, tool.input_schema, strict=bool(tool.strict), param=param)


def _check_search_name(tool: schema.MessagesTool, path: str) -> None:
    """Refuse a name that differs from the fixed name of the tool's type. Raises InvalidParameter."""
    if tool.name not in (None, SEARCH_NAME):
        message = f"`{path}.name` must be '{SEARCH_NAME}' for a tool of type '{shown(tool.type or '')}'."
        raise InvalidParameter(message, param=f"{path}.name")


def _name(change: schema.ToolChange, path: str) -> str:
    if not (name := change.name or change.tool_name):
        raise InvalidParameter(f"`{path}` must name a tool.", param=path)
    return name


def encode_call_id(call_id: str, *, is_search: bool = False) -> str:
    return (_SEARCH_PREFIX if is_search else _WIRE_PREFIX) + call_id.removeprefix(_ENGINE_PREFIX)


def _decode_call_id(call_id: str) -> str:
    """Return the engine's id of a call that this server made; an id from another server is not changed."""
    rest = call_id.removeprefix(_SEARCH_PREFIX).removeprefix(_WIRE_PREFIX)
    return call_id if rest == call_id else _ENGINE_PREFIX + rest


class Conversation:
    """Decodes the messages of one request in their order. A tool result has the name of the latest call with its id."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._calls = PastCalls()
        self._unsealer = Unsealer()

    def decode(self, message: schema.InputMessage, path: str) -> list[Message]:
        """Decode the message at `path`. Its tool results precede its text, each as a separate message."""
        parts = self.parts(message.content, f"{path}.content")
        if message.role == "assistant":
            return split_searches(parts)
        if message.role != "user":
            return [Message(message.role, parts)]
        results = [Message("tool", (part,)) for part in parts if isinstance(part, ToolResultPart)]
        visible = tuple(part for part in parts if not isinstance(part, ToolResultPart))
        return [*results, Message("user", visible)] if visible or not results else results

    def parts(self, content: str | Sequence[AnyBlock], path: str) -> tuple[Any, ...]:
        """Return the parts of some content; a string is one text block."""
        if isinstance(content, str):
            return (TextPart(content),)
        return tuple(part for number, block in enumerate(content) for part in self._block(block, f"{path}[{number}]"))

    def _block(self, block: AnyBlock, path: str) -> Sequence[Part]:
        match block:
            case schema.TextBlock(text=text):
                return (TextPart(text),)
            case schema.ThinkingBlock():
                thinking = block.thinking or self._unsealer.unseal(block.signature or "", path)
                return (ReasoningPart(thinking),) if thinking else ()
            case schema.RedactedThinkingBlock():
                return ()  # only the server that made it can read it
            case schema.ToolUseBlock() | schema.ServerToolUseBlock():
                call_id = self._calls.add(_decode_call_id(block.id), block.name)
                return (ToolCallPart(call_id, block.name, dict(block.input or {})),)
            case schema.ToolResultBlock():
                call_id, name = self._calls.answered(_decode_call_id(block.tool_use_id), f"{path}.tool_use_id")
                content = self.parts(() if block.content is None else block.content, f"{path}.content")
                return (ToolResultPart(call_id, content, name, bool(block.is_error)),)
            case schema.WebSearchResultBlock():
                return (result_part(self._search(block, path)),)
            case schema.ImageBlock(source=source):
                return (ImagePart(_file_source(source, path), param=f"{path}.source"),)
            case schema.DocumentBlock():
                _check_citations(block, path)
                return self._document(block.source, "\n".join(filter(None, (block.title, block.context))), path)
            case schema.SearchResultBlock():
                _check_citations(block, path)
                texts = [block.title, block.source, *(text.text for text in block.content)]
                return (TextPart("\n".join(texts)),)
            case schema.ToolReferenceBlock(tool_name=name):
                return (TextPart(self._tools.introduce(name)),)
            case schema.OtherBlock():
                return (TextPart(f"\n{text}\n"),) if (text := "\n".join(block.texts)) else ()
            case schema.ToolChangeBlock(tool=change):
                apply = self._tools.add if block.type == "tool_addition" else self._tools.remove
                return (TextPart(apply(change, f"{path}.tool")),)

    def _search(self, block: schema.WebSearchResultBlock, path: str) -> SearchDone:
        call_id, _ = self._calls.answered(_decode_call_id(block.tool_use_id), f"{path}.tool_use_id")
        content = block.content
        if isinstance(content, schema.WebSearchError):
            return SearchDone(call_id, "", error=SEARCH_ERRORS.get(content.error_code, "unavailable"))
        pages = (
            FoundPage(page.url, page.title, self._unsealer.unseal(page.encrypted_content, path) or "")
            for page in content
        )
        return SearchDone(call_id, "", tuple(pages))

    def _document(self, source: schema.DocumentSource, head: str, path: str) -> Sequence[Part]:
        heads = (TextPart(head),) if head else ()
        match source:
            case schema.TextSource(data="") | schema.ContentSource(content="" | []):
                return decode_file(_EMPTY_FILE, head, param=f"{path}.source")
            case schema.TextSource(data=text):
                return (*heads, TextPart(text))
            case schema.ContentSource(content=content):
                return (*heads, *self.parts(content, f"{path}.source.content"))
            case _:
                return decode_file(_file_source(source, path), head, param=f"{path}.source")


def _decode_conversation(body: schema.CountTokensBody, tools: Toolbox) -> tuple[Message, ...]:
    conversation = Conversation(tools)
    messages = [Message("system", conversation.parts(body.system, "system"))] if body.system else []
    for number, message in enumerate(body.messages):
        messages += conversation.decode(message, f"messages[{number}]")
    return without_client_marks(messages)


def _check_citations(block: schema.DocumentBlock | schema.SearchResultBlock, path: str) -> None:
    if block.citations is not None and block.citations.enabled:
        param = f"{path}.citations"
        raise Unsupported(f"`{param}`: this server's replies cite no documents. Leave `citations` out.", param=param)


def _file_source(source: schema.ImageSource, path: str) -> str:
    match source:
        case schema.Base64Source(media_type=media_type, data=data):
            return f"data:{media_type};base64,{data}"
        case schema.URLSource(url=url):
            return url
        case schema.FileSource():
            raise Unsupported(f"`{path}`: this server keeps no files. Send the content itself.", param=path)
