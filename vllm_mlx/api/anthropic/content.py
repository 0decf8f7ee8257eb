"""Wire blocks and tools → parts of core messages and core tools. Keeps order and whitespace; drops cache marks.

The prompt lists some tools at its start; others appear as text where the conversation names them.
"""

import json
from collections.abc import Iterable, Sequence

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import (
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
)
from ..parameters import named_choice, required_name
from ..sealed import Unsealer
from . import schema

# Anthropic runs these tools on its own servers; this server cannot.
_RUN_BY_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")


MAX_INTRODUCED_CHARS = 16 * 1024 * 1024  # a short block may name a long definition, again and again


class Toolbox:
    """The tools of a request, in its order: the prompt lists the `listed` ones at its start."""

    def __init__(self, tools: Iterable[schema.MessagesTool]) -> None:
        self.listed: list[ToolSpec] = []
        self.deferred: list[ToolSpec] = []
        for number, tool in enumerate(tools):
            if (tool.type or "custom").startswith(_RUN_BY_ANTHROPIC):
                continue
            spec = _spec(tool, f"tools[{number}]")
            (self.deferred if tool.defer_loading else self.listed).append(spec)
        self._texts: dict[str, str] = {}  # definitions that the conversation introduced, by name
        self._num_introduced = 0  # characters
        self._by_name = {spec.name: spec for spec in (*self.listed, *self.deferred)}

    def introduce(self, name: str) -> str:
        """The text that introduces a tool into the conversation: its definition, as templates list tools."""
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
    """The choice, and the maximum number of calls in one reply; None: any number."""
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
    name = required_name(tool.name, path)
    if tool.input_schema is None and (tool.type or "custom") == "custom":
        raise InvalidParameter(f"`{path}.input_schema` is required.", param=f"{path}.input_schema")
    return ToolSpec(
        name=name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=bool(tool.strict),
        param=f"{path}.input_schema",
    )


def _name(change: schema.ToolChange, path: str) -> str:
    name = change.name or change.tool_name
    if not name:
        raise InvalidParameter(f"`{path}` must name a tool.", param=path)
    return name


VisiblePart = TextPart | ImagePart
VisibleBlock = (
    schema.TextBlock
    | schema.ImageBlock
    | schema.DocumentBlock
    | schema.SearchResultBlock
    | schema.ToolReferenceBlock
    | schema.ToolChangeBlock
)


def decode_content(content: str | Sequence[VisibleBlock], tools: Toolbox, path: str) -> tuple[VisiblePart, ...]:
    """Decode the content of a message; a string is one text block."""
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(
        part for number, block in enumerate(content) for part in decode_block(block, tools, f"{path}[{number}]")
    )


def decode_block(block: VisibleBlock, tools: Toolbox, path: str) -> Sequence[VisiblePart]:
    match block:
        case schema.TextBlock(text=text):
            return (TextPart(text),)
        case schema.ImageBlock():
            return (_image(block, path),)
        case schema.DocumentBlock():
            return _document(block, tools, path)
        case schema.SearchResultBlock():
            texts = [block.title, block.source, *(text.text for text in block.content)]
            return (TextPart("\n".join(texts)),)
        case schema.ToolReferenceBlock(tool_name=name):
            return (TextPart(tools.introduce(name)),)
        case schema.ToolChangeBlock(tool=change):
            apply = tools.add if block.type == "tool_addition" else tools.remove
            return (TextPart(apply(change, f"{path}.tool")),)


def decode_result(block: schema.ToolResultBlock, names: dict[str, str], tools: Toolbox, path: str) -> ToolResultPart:
    """Decode a tool result; its name is that of the latest call with its id."""
    content = () if block.content is None else decode_content(block.content, tools, f"{path}.content")
    call_id = decode_call_id(block.tool_use_id)
    return ToolResultPart(call_id, content, names.get(call_id), bool(block.is_error))


def decode_assistant(message: schema.AssistantMessage, unsealer: Unsealer, path: str) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    parts: list[Part] = []
    for block in message.content:
        match block:
            case schema.TextBlock(text=text):
                parts.append(TextPart(text))
            case schema.ThinkingBlock():
                thinking = block.thinking or unsealer.unseal(block.signature or "", path)
                if thinking:
                    parts.append(ReasoningPart(thinking))
            case schema.RedactedThinkingBlock():
                pass  # only the server that made it can read it
            case schema.ToolUseBlock(id=call_id, name=name, input=arguments):
                arguments = dict(arguments or {})
                parts.append(ToolCallPart(decode_call_id(call_id), name, arguments))
    return tuple(parts)


# Ids of tool calls: clients expect Anthropic's prefix, while the engine's own ids have OpenAI's.
_ENGINE_PREFIX, _WIRE_PREFIX = "call_", "toolu_"


def encode_call_id(call_id: str) -> str:
    return _WIRE_PREFIX + call_id.removeprefix(_ENGINE_PREFIX)


def decode_call_id(call_id: str) -> str:
    """The engine's id of a call that this server made; an id from another server is not changed."""
    rest = call_id.removeprefix(_WIRE_PREFIX)
    return call_id if rest == call_id else _ENGINE_PREFIX + rest


def _image(block: schema.ImageBlock, path: str) -> ImagePart:
    match block.source:
        case schema.Base64Source(media_type=media_type, data=data):
            return ImagePart(f"data:{media_type};base64,{data}", param=f"{path}.source")
        case schema.URLSource(url=url):
            return ImagePart(url, param=f"{path}.source")
        case schema.FileSource():
            raise _no_files(path)


def _document(block: schema.DocumentBlock, tools: Toolbox, path: str) -> Sequence[VisiblePart]:
    head = "\n".join(filter(None, (block.title, block.context)))
    heading = (TextPart(head),) if head else ()
    match block.source:
        case schema.TextSource(data=text):
            return (*heading, TextPart(text))
        case schema.ContentSource(content=content):
            return (*heading, *decode_content(content, tools, f"{path}.source.content"))
        case schema.Base64Source(media_type=media_type):
            raise Unsupported(
                f"`{path}`: documents of type {shown(media_type)} are not supported. Send the text of the document, or "
                "its pages as images.",
                param=path,
            )
        case schema.URLSource():
            raise Unsupported(f"`{path}`: this server fetches no documents. Send the text itself.", param=path)
        case schema.FileSource():
            raise _no_files(path)


def _no_files(path: str) -> Unsupported:
    return Unsupported(f"`{path}`: this server keeps no files. Send the content itself.", param=path)
