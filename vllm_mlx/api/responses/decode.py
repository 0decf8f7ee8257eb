"""Request bodies → core Requests, and how the client wants the reply written. Every field is honoured or refused.

Ids of items are not decoded, since every session has new ones. A tool of a namespace gets one name, which replies split
again.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from ...core.errors import InvalidParameter, ItemNotFound, Unsupported, shown
from ...core.messages import (
    DocumentPart,
    ImagePart,
    Message,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
)
from ...core.request import Request
from ..guides import SchemaFormat, decode_format
from ..parameters import (
    Decoded,
    allowed_choice,
    custom_parameters,
    decode_file,
    decode_file_data,
    decode_image,
    decode_sampling,
    decode_thinking,
    named_choice,
    past_arguments,
    required_name,
    without_client_marks,
)
from ..past_calls import PastCalls
from ..search import NO_SEARCH, PAGES, SEARCH_NAME, SearchTool, search_spec, search_tool, unpacked_search
from ..text import CUSTOM_INPUT, Unsealer
from ..wire import Refused
from . import schema
from .replies import ResponseSpec, Tools
from .stored import KeptInput, kept_input

ENCRYPTED_REASONING = "reasoning.encrypted_content"
USUAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0}
SentPart = TextPart | ImagePart | DocumentPart
_NOT_LIVE = (
    "A web search with `external_web_access` false reads a stored copy of the web, which this server does not have. "
    'Set it to true (in Codex `web_search="live"`), or leave the search out.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedResponse(Decoded[ResponseSpec]):
    """A decoded body with its own input, `kept`, without earlier responses; empty if the response is not stored."""

    kept: KeptInput


def decode_response(
    body: schema.ResponsesBody,
    spec: ResponseSpec,
    *,
    earlier: Sequence[schema.InputItem] = (),
    searches: bool = False,
    usual: Mapping[str, float] = USUAL,
) -> DecodedResponse:
    """Decode a body. `spec`: of the reply, so far without the client's wishes.

    `earlier`: the conversation that `previous_response_id` names; `searches`: the server runs them. `usual`: the
    temperature and the top_p of requests that give none.
    """
    _check(body)
    tools = decode_tools(body.tools or (), searches=searches, max_searches=body.max_tool_calls)
    _check_search(body, tools, searches=searches)
    reasoning, include = body.reasoning or schema.ReasoningSettings(), body.include or ()
    items = _input_items(body)
    request = Request(
        request_id=spec.reply_id,
        messages=_messages(body, {"previous_response_id.input": earlier, "input": items}, tools.custom),
        tools=tools.specs,
        tool_choice=decode_tool_choice(body.tool_choice, tools),
        max_tool_calls=1 if body.parallel_tool_calls is False else None,
        sampling=decode_sampling(
            body,
            max_tokens=body.max_output_tokens,
            guide=decode_format(None if body.text is None else body.text.format, "text.format"),
            logprobs=(body.top_logprobs or 0) if schema.LOGPROBS in include else None,
        ),
        keeps_reasoning=body.cache_reasoning_tokens,
        cache_salt=body.cache_salt or "",
        **decode_thinking(reasoning.effort, body.chat_template_kwargs),
    )
    reply = replace(
        spec,
        stream=bool(body.stream),
        store=body.store is not False,
        background=bool(body.background),
        shows_summary=bool(reasoning.summary or reasoning.generate_summary),
        seals_reasoning=body.store is False or ENCRYPTED_REASONING in include,
        tools=tools,
        search=tools.search,
        left_out=tools.left_out,
        shows_sources="web_search_call.action.sources" in include,
        shows_results="web_search_call.results" in include,
        echo=_echo(body, usual),
    )
    kept = kept_input(items, spec.reply_id) if reply.store else KeptInput()
    return DecodedResponse(requests=(request,), reply=reply, kept=kept)


def _input_items(body: schema.ResponsesBody) -> tuple[schema.InputItem, ...]:
    if isinstance(body.input, str):
        text = schema.InputText(type="input_text", text=body.input)
        return (schema.MessageItem(type="message", role="user", content=[text]),)
    return tuple(body.input)


def _messages(
    body: schema.ResponsesBody, items: Mapping[str, Sequence[schema.InputItem]], custom: frozenset[str]
) -> tuple[Message, ...]:
    """Return the conversation. `instructions` are those of this request: earlier ones are not repeated."""
    messages = decode_items(items, custom)
    if body.instructions:
        messages.insert(0, Message("system", (TextPart(body.instructions),)))
    if not messages:
        raise InvalidParameter("`input` must not be empty.", param="input")
    return without_client_marks(messages)


def _check(body: schema.ResponsesBody) -> None:
    """Refuse values of `include` that this server does not know, and fields that contradict each other."""
    if body.top_logprobs and schema.LOGPROBS not in (body.include or ()):
        message = f"`top_logprobs` needs `include` with '{schema.LOGPROBS}'."
        raise InvalidParameter(message, param="top_logprobs")
    for name in body.include or ():
        rule = schema.INCLUDED.get(name)
        if rule is None or isinstance(rule, Refused):
            advice = "Leave it out." if rule is None else rule.advice
            raise Unsupported(f"`include` '{shown(name)}' is not supported. {advice}", param="include")
    if body.background and body.stream:
        raise Unsupported("`background` does not go with `stream`: poll the response.", param="background")
    if body.background and body.store is False:
        raise InvalidParameter("`background` needs `store`: the response is read later.", param="background")


def _check_search(body: schema.ResponsesBody, tools: Tools, *, searches: bool) -> None:
    """Refuse a request whose only or chosen tool is a web search that cannot run. From others, the tool is left out."""
    asked = [tool for tool in body.tools or () if isinstance(tool, schema.WebSearchTool)]
    is_forced = isinstance(body.tool_choice, schema.ResponsesToolChoice) and body.tool_choice.is_web_search
    if tools.search is None and (is_forced or (asked and not tools.specs)):
        reason = _NOT_LIVE if searches and asked else NO_SEARCH
        raise Unsupported(reason, param="tool_choice" if is_forced else "tools")


def decode_items(
    items: Mapping[str, Sequence[schema.InputItem]], custom: frozenset[str] = frozenset()
) -> list[Message]:
    """Decode items into messages in their order. Neighbouring items of the assistant become one message.

    `items` are lists, by the names that errors have for them. `custom`: the names of custom tools, whose calls may come
    back as calls of functions.
    """
    messages: list[Message] = []
    for role, neighbours in groupby(_Items(custom).decode(items), key=attrgetter("role")):
        if role != "assistant":
            messages += neighbours
        elif parts := tuple(part for message in neighbours for part in message.parts):
            messages.append(Message("assistant", parts))
    return messages


class _Items:
    """Decodes the items of one request, each into one message, and a search into its call and its result."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._calls = PastCalls()
        self._unsealer = Unsealer()
        self._messages: list[Message] = []
        self._searches: dict[str, deque[int]] = defaultdict(deque)  # by query: places where a search's call is missing

    def decode(self, given: Mapping[str, Sequence[schema.InputItem]]) -> list[Message]:
        for place, items in given.items():
            for number, item in enumerate(items):
                self._add(item, f"{place}[{number}]")
        return self._messages

    def _add(self, item: schema.InputItem, path: str) -> None:
        messages = self._messages
        match item:
            case schema.MessageItem():
                role: Role = "system" if item.role == "developer" else item.role
                messages.append(Message(role, _parts(item.content, f"{path}.content")))
            case schema.ReasoningItem():
                self._add_reasoning(item, path)
            case schema.FunctionCallItem() | schema.CustomCallItem():
                messages.append(Message("assistant", (_call(item, self._custom, self._calls),)))
            case schema.WebSearchCallItem(action=schema.SearchAction(query=str(query))):
                self._searches[query].append(len(messages))
                messages.append(Message("assistant", ()))
            case schema.CallOutputItem(call_id=call_id):
                call_id, name = self._calls.answered(call_id, f"{path}.call_id")
                messages.append(Message("tool", (ToolResultPart(call_id, _output(item, path), name),)))
            case schema.ItemReference(id=item_id):
                message = f"`{path}`: no item `{shown(item_id)}` is stored. Send the item itself."
                raise ItemNotFound(message, param=path)
            case schema.OtherItem(type=kind) if kind not in schema.SKIPPED_ITEMS:
                raise Unsupported(f"`{path}.type` '{shown(kind)}' is not supported.", param=f"{path}.type")

    def _add_reasoning(self, item: schema.ReasoningItem, path: str) -> None:
        """Add the text of the item, or its sealed text, or its summary, which this server fills with the same text.

        A sealed text may be a search: its call belongs where its own item stands, and its result here.
        """
        text = "".join(part.text for part in item.content or ())
        sealed = "" if text else self._unsealer.unseal(item.encrypted_content or "", path) or ""
        if (search := unpacked_search(sealed)) is not None:
            call, result = search
            query = call.arguments.get("query")
            places = self._searches[query if isinstance(query, str) else ""]
            if places:
                self._messages[places.popleft()] = Message("assistant", (call,))
            else:
                self._messages.append(Message("assistant", (call,)))
            self._messages.append(Message("tool", (result,)))
        elif text := text or sealed or "\n".join(part.text for part in item.summary or ()):
            self._messages.append(Message("assistant", (ReasoningPart(text),)))


def _call(
    item: schema.FunctionCallItem | schema.CustomCallItem, custom: frozenset[str], calls: PastCalls
) -> ToolCallPart:
    if isinstance(item, schema.CustomCallItem):
        return ToolCallPart(calls.add(item.call_id, item.name), item.name, {CUSTOM_INPUT: item.input})
    arguments = past_arguments(item.arguments, is_custom=item.name in custom)
    name = flat_name(item.namespace, item.name)
    return ToolCallPart(calls.add(item.call_id, name), name, arguments)


def _output(item: schema.CallOutputItem, path: str) -> tuple[SentPart, ...]:
    if isinstance(item.output, dict):
        return (TextPart(json.dumps(item.output, ensure_ascii=False)),)
    return _parts(item.output or "", f"{path}.output")


def _parts(content: str | Sequence[schema.ContentPart], path: str) -> tuple[SentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(sent for number, part in enumerate(content) for sent in decode_part(part, f"{path}[{number}]"))


def decode_part(part: schema.ContentPart, path: str) -> Sequence[SentPart]:
    match part:
        case schema.InputText(text=text) | schema.RefusalPart(refusal=text):
            return (TextPart(text),)
        case schema.InputImage(image_url=str(url), file_id=None, detail=detail):
            return (decode_image(url, detail, param=f"{path}.image_url"),)
        case schema.InputImage(file_id=None):
            message = f"`{path}` has no content. Send it as `image_url`."
            raise InvalidParameter(message, param=path, code="missing_required_parameter")
        case schema.InputImage():
            raise Unsupported(f"`{path}`: this server keeps no files. Send an `image_url`.", param=path)
        case schema.InputFile(file_url=str(), file_data=str()):
            message = f"`{path}` has both `file_data` and `file_url`. Send one of the two."
            raise InvalidParameter(message, param=path)
        case schema.InputFile(file_url=str(url), file_id=None):
            return decode_file(url, part.filename, param=f"{path}.file_url")
        case schema.InputFile():
            return decode_file_data(part.file_data, part.file_id, part.filename, path)


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def decode_tools(tools: Sequence[schema.AnyTool], *, searches: bool = False, max_searches: int | None = None) -> Tools:
    """Tools that the client runs reach the prompt, and a live web search if this server runs searches.

    Other types need a server that runs them, so they are left out.
    """
    specs: list[ToolSpec] = []
    namespaces: dict[str, tuple[str, str]] = {}
    search, left_out = None, []
    for path, namespace, tool in _flat_tools(tools):
        match tool:
            case schema.FunctionTool() | schema.CustomTool() if namespace is None or tool.type == "function":
                flat = flat_name(namespace, name := required_name(tool.name, path))
                if namespace is not None:
                    namespaces[flat] = (namespace, name)
                specs.append(_spec(tool, flat, path))
            case schema.WebSearchTool(is_live=True) if searches and namespace is None:
                search = _search(tool, path, max_searches)
                specs.append(search_spec(tool.user_location, path))
            case schema.WebSearchTool(is_live=False) if searches:
                left_out.append(f"{path}.{tool.type}.external_web_access")
            case _:
                left_out.append(f"{path}.{tool.type}")
    custom = frozenset(tool.name or "" for tool in tools if isinstance(tool, schema.CustomTool))
    return Tools(specs=tuple(specs), namespaces=namespaces, custom=custom, search=search, left_out=tuple(left_out))


def _spec(tool: schema.FunctionTool | schema.CustomTool, name: str, path: str) -> ToolSpec:
    if isinstance(tool, schema.CustomTool):
        return ToolSpec(name, tool.description, custom_parameters(tool.format), param=f"{path}.format")
    param = f"{path}.parameters"
    return ToolSpec(name, tool.description, tool.parameters, strict=bool(tool.strict), param=param)


def _search(tool: schema.WebSearchTool, path: str, max_searches: int | None) -> SearchTool:
    filters = tool.filters or schema.SearchFilters()
    return search_tool(
        max_uses=max_searches,
        allowed=filters.allowed_domains or (),
        blocked=filters.blocked_domains or (),
        num_pages=PAGES[tool.search_context_size or "medium"],
        param=path,
    )


def _flat_tools(tools: Sequence[schema.AnyTool]) -> Iterator[tuple[str, str | None, schema.AnyTool]]:
    """Yield the path, namespace and definition of each tool, those inside of namespaces among them."""
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if not isinstance(tool, schema.NamespaceTool):
            yield path, None, tool
            continue
        namespace = required_name(tool.name, path)
        for inner, member in enumerate(tool.tools or ()):
            yield f"{path}.tools[{inner}]", namespace, member


def decode_tool_choice(
    choice: str | schema.AllowedToolChoice | schema.ResponsesToolChoice | None, found: Tools
) -> ToolChoice:
    tools = found.specs
    match choice:
        case schema.ResponsesToolChoice(is_web_search=True) if found.search is not None:
            return ToolChoice("required", SEARCH_NAME)
        case None | "auto" | "none":
            return ToolChoice("auto" if choice is None else choice)
        case "required" if not tools:
            raise InvalidParameter("`tool_choice` 'required' needs `tools`.", param="tool_choice")
        case "required":
            return ToolChoice("required")
        case schema.ResponsesToolChoice(type="function" | "custom", name=str(name)):
            return named_choice(name, tools)
        case schema.AllowedToolChoice():
            return allowed_choice(choice.mode, choice.tools, tools, param="tool_choice")
        case schema.ResponsesToolChoice(type=kind):
            raise Unsupported(
                f"`tool_choice` of type '{shown(kind)}' is not supported. Name a function, or use 'required'.",
                param="tool_choice",
            )
        case other:
            raise InvalidParameter(
                f"Invalid value for `tool_choice`: {shown(other)}! Only 'auto', 'none', 'required' or a tool are "
                "supported.",
                param="tool_choice",
            )


def _echo(body: schema.ResponsesBody, usual: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings that the response repeats, as they are used."""
    choice = "auto" if body.tool_choice is None else body.tool_choice
    reasoning, text = body.reasoning or schema.ReasoningSettings(), body.text or schema.TextSettings()
    extra = body.model_extra or {}
    return {
        **{name: usual[name] if (given := getattr(body, name)) is None else given for name in USUAL},
        **{name: getattr(body, name) or 0.0 for name in ("presence_penalty", "frequency_penalty")},
        **{name: extra.get(name) for name in ("safety_identifier", "prompt_cache_key", "user")},
        "top_logprobs": body.top_logprobs or 0,
        "max_tool_calls": body.max_tool_calls,
        "service_tier": "default",
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "store": body.store is not False,
        "background": bool(body.background),
        "text": {
            "format": {"type": "text"} if text.format is None else _echoed_format(text.format),
            "verbosity": (text.model_extra or {}).get("verbosity") or "medium",
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
        "tools": [_echoed_tool(tool) for tool in body.tools or ()],
        "truncation": "disabled",
    }


def _echoed_format(format_: SchemaFormat) -> dict[str, Any]:
    fixed = {"description": None, "strict": True} if format_.type == "json_schema" else {}  # it is always enforced
    return {**fixed, **format_.model_dump(by_alias=True, exclude_unset=True)}


def _echoed_tool(tool: schema.AnyTool) -> dict[str, Any]:
    fixed = {"description": None, "parameters": None, "strict": False} if tool.type == "function" else {}
    return {**fixed, **tool.model_dump(exclude_unset=True, exclude_none=True)}
