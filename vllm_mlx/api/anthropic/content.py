"""Wire blocks → parts of core messages. Keeps order and whitespace; drops cache marks."""

from collections.abc import Sequence

from ...core.errors import Unsupported, shown
from ...core.messages import ImagePart, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from ..sealed import Unsealer
from .schema import (
    AssistantMessage,
    Base64Source,
    ContentSource,
    DocumentBlock,
    FileSource,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)
from .tools import Toolbox

VisiblePart = TextPart | ImagePart
VisibleBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
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
        case TextBlock(text=text):
            return (TextPart(text),)
        case ImageBlock():
            return (_image(block, path),)
        case DocumentBlock():
            return _document(block, tools, path)
        case SearchResultBlock():
            texts = [block.title, block.source, *(text.text for text in block.content)]
            return (TextPart("\n".join(texts)),)
        case ToolReferenceBlock(tool_name=name):
            return (TextPart(tools.introduce(name)),)
        case ToolAdditionBlock(tool=change):
            return (TextPart(tools.add(change, f"{path}.tool")),)
        case ToolRemovalBlock(tool=change):
            return (TextPart(tools.remove(change, f"{path}.tool")),)


def decode_result(block: ToolResultBlock, names: dict[str, str], tools: Toolbox, path: str) -> ToolResultPart:
    """Decode a tool result; its name is that of the latest call with its id."""
    content = () if block.content is None else decode_content(block.content, tools, f"{path}.content")
    call_id = decode_call_id(block.tool_use_id)
    return ToolResultPart(call_id, content, names.get(call_id), bool(block.is_error))


def decode_assistant(message: AssistantMessage, unsealer: Unsealer, path: str) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    parts: list[Part] = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                parts.append(TextPart(text))
            case ThinkingBlock():
                thinking = block.thinking or unsealer.unseal(block.signature or "", path)
                if thinking:
                    parts.append(ReasoningPart(thinking))
            case RedactedThinkingBlock():
                pass  # only the server that made it can read it
            case ToolUseBlock(id=call_id, name=name, input=arguments):
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


def _image(block: ImageBlock, path: str) -> ImagePart:
    match block.source:
        case Base64Source(media_type=media_type, data=data):
            return ImagePart(f"data:{media_type};base64,{data}", param=f"{path}.source")
        case URLSource(url=url):
            return ImagePart(url, param=f"{path}.source")
        case FileSource():
            raise _no_files(path)


def _document(block: DocumentBlock, tools: Toolbox, path: str) -> Sequence[VisiblePart]:
    head = "\n".join(filter(None, (block.title, block.context)))
    heading = (TextPart(head),) if head else ()
    match block.source:
        case TextSource(data=text):
            return (*heading, TextPart(text))
        case ContentSource(content=content):
            return (*heading, *decode_content(content, tools, f"{path}.source.content"))
        case Base64Source(media_type=media_type):
            raise Unsupported(
                f"`{path}`: documents of type {shown(media_type)} are not supported. Send the text of the document, or "
                "its pages as images.",
                param=path,
            )
        case URLSource():
            raise Unsupported(f"`{path}`: this server fetches no documents. Send the text itself.", param=path)
        case FileSource():
            raise _no_files(path)


def _no_files(path: str) -> Unsupported:
    return Unsupported(f"`{path}`: this server keeps no files. Send the content itself.", param=path)
