"""Wire types of replies: the response and its items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from ...core.errors import VLLMMLXError
from ...core.events import Finished, FinishReason, SearchDone, ToolCallStart, Usage
from ...core.messages import ToolSpec
from ..blocks import BlockEnd, BlockStart
from ..error_replies import response_code
from ..openai.replies import ContentLogprob
from ..parameters import Spec
from ..replies import CacheShortfall, ErrorText, FinishDetails, Reply, finish_details, given, shortfall_of
from ..search import SEARCH_NAME, SearchTool, packed_search
from ..text import custom_input, seal

Namespaces = Mapping[str, tuple[str, str]]  # the name that the model sees -> (namespace, name inside it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    specs: tuple[ToolSpec, ...] = ()
    namespaces: Namespaces = field(default_factory=dict)
    custom: frozenset[str] = frozenset()  # names of tools that take one text
    search: SearchTool | None = None
    left_out: tuple[str, ...] = ()  # paths and types of the tools that the model does not see


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec(Spec):
    """The form of a response. `created_at`: unix seconds; `echo`: the request's fields that the reply repeats."""

    created_at: int
    store: bool = True
    background: bool = False
    shows_summary: bool = False
    seals_reasoning: bool = False  # so that the client can send back reasoning that is not stored
    tools: Tools = field(default_factory=Tools)
    shows_sources: bool = False  # whether items of searches list the pages
    shows_results: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)


ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Reply):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[ContentLogprob]

    @classmethod
    def of(cls, text: str, logprobs: Sequence[ContentLogprob] = ()) -> "OutputText":
        return cls(text=text, annotations=[], logprobs=list(logprobs))


class ReasoningText(Reply):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(Reply):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputMessage(Reply):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class Reasoning(Reply):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCall(Reply):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCall(Reply):
    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    input: str


class SearchSource(Reply):
    type: Literal["url"] = "url"
    url: str


class SearchAction(Reply):
    type: Literal["search"] = "search"
    query: str
    sources: list[SearchSource] | None = None


class SearchResult(Reply):
    url: str
    title: str
    text: str


class WebSearchCall(Reply):
    """The `encrypted_content` of a reasoning item after it holds the call and its result for the next turn."""

    id: str
    type: Literal["web_search_call"] = "web_search_call"
    status: Literal["in_progress", "completed", "failed"]
    action: SearchAction | None = None
    results: list[SearchResult] | None = None


OutputItem = OutputMessage | Reasoning | FunctionCall | CustomCall | WebSearchCall


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    cache_shortfall: CacheShortfall | None = None

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            **given(cache_shortfall=shortfall_of(usage.receipt)),
        )


class ResponseError(Reply):
    code: str
    message: ErrorText


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(Reply):
    """A response. It also repeats the request's own fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    finish_details: FinishDetails | None = None
    usage: ResponseUsage | None = None
    background: bool = False


class InputItemList(Reply):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Reply):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Deleted(Reply):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def response(
    spec: ResponseSpec,
    status: Status,
    output: Sequence[OutputItem] = (),
    *,
    end: Finished | None = None,
    error: VLLMMLXError | None = None,
) -> ResponseReply:
    return ResponseReply(
        id=spec.reply_id,
        created_at=spec.created_at,
        completed_at=None,
        status=status,
        model=spec.model,
        output=list(output),
        error=None if error is None else ResponseError(code=response_code(error), message=error.message),
        incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        usage=None if end is None else ResponseUsage.of(end.usage),
        **({} if end is None else finish_details(end)),
        **spec.echo,
    )


def final_status(event: Finished) -> Literal["completed", "incomplete"]:
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    return "incomplete" if event.reason is FinishReason.LENGTH else "completed"


def item(
    spec: ResponseSpec,
    block: BlockStart | BlockEnd,
    status: ItemStatus,
    found: SearchDone | None = None,
    logprobs: Sequence[ContentLogprob] = (),
) -> OutputItem:
    """Return the item of a block: with its content if the block has ended, without if it starts.

    Its id is as unique as the response's own, and always the same for a block. `found`: by the block's search.
    `logprobs`: of the block's text.
    """
    unique = f"{spec.reply_id.removeprefix('resp_')}{block.index:02}"
    if block.search is not None:
        return _result(f"rs_{unique}", block.search, is_complete=isinstance(block, BlockEnd))
    texts = [block.text] if isinstance(block, BlockEnd) else []
    if block.call is not None and is_search(spec, block.call):
        return _search(spec, f"ws_{unique}", found)
    if block.call is not None:
        return _call(spec, block.call, "".join(texts), status, unique)
    if block.kind == "text":
        content = [OutputText.of(text, logprobs) for text in texts]
        return OutputMessage(id=f"msg_{unique}", status=status, content=content)
    sealed = seal(block.text) if spec.seals_reasoning and isinstance(block, BlockEnd) else None
    return Reasoning(
        id=f"rs_{unique}",
        status=status,
        summary=[SummaryText(text=text) for text in texts] if spec.shows_summary else [],  # the reasoning itself
        content=[ReasoningText(text=text) for text in texts],
        **given(encrypted_content=sealed),
    )


def is_search(spec: ResponseSpec, call: ToolCallStart) -> bool:
    return spec.search is not None and call.name == SEARCH_NAME


def _search(spec: ResponseSpec, item_id: str, found: SearchDone | None) -> WebSearchCall:
    if found is None:
        return WebSearchCall(id=item_id, status="in_progress")
    pages = [SearchResult(url=page.url, title=page.title, text=page.text) for page in found.pages]
    sources = [SearchSource(url=page.url) for page in found.pages] if spec.shows_sources else None
    return WebSearchCall(
        id=item_id,
        status="completed" if found.error is None else "failed",
        action=SearchAction(query=found.query, **given(sources=sources)),
        **given(results=pages if spec.shows_results else None),
    )


def _result(item_id: str, found: SearchDone, *, is_complete: bool) -> Reasoning:
    """Return the item that brings a search and its result into the next turn.

    It is an item of reasoning, because clients keep the `encrypted_content` of reasoning alone.
    """
    if not is_complete:
        return Reasoning(id=item_id, status="in_progress", summary=[], content=[])
    sealed = seal(packed_search(found))
    return Reasoning(id=item_id, status="completed", summary=[], content=[], encrypted_content=sealed)


def _call(
    spec: ResponseSpec, call: ToolCallStart, arguments: str, status: ItemStatus, unique: str
) -> FunctionCall | CustomCall:
    """Return the item of a call. The one argument of a custom call is its input; other arguments are all its JSON."""
    if call.name in spec.tools.custom:
        text = custom_input(arguments)
        return CustomCall(id=f"ctc_{unique}", status=status, call_id=call.call_id, name=call.name, input=text)
    namespace, name = spec.tools.namespaces.get(call.name, (None, call.name))
    place: Any = {"id": f"fc_{unique}", "status": status, "call_id": call.call_id, **given(namespace=namespace)}
    return FunctionCall(**place, name=name, arguments=arguments)
