"""Web search that the server runs: its tool, its parameters in requests, and results as the model reads them.

Knows no protocol, and searches nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, get_args
from urllib.parse import urlsplit

from ..core.errors import InvalidParameter, setting
from ..core.events import FoundPage, SearchDone, SearchError
from ..core.messages import Message, Part, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from .text import json_in
from .wire import ExtraFields, Wire

SEARCH_NAME = "web_search"
MAX_USES = 20  # most searches for one reply
DEFAULT_USES = 8
DEFAULT_PAGES = 5
ContextSize = Literal["low", "medium", "high"]
PAGES: Mapping[ContextSize, int] = {"low": 3, "medium": DEFAULT_PAGES, "high": 10}  # pages of one search
SEARCH_ERRORS: Mapping[str, SearchError] = {error: error for error in get_args(SearchError)}
_MAX_DOMAINS = 100
_MAX_SUFFIX = 500  # characters: search engines take no long queries
NO_SEARCH = (
    f"This server has no web search. Offer a tool of your own, or start the server with {setting('web_search')}."
)


class UserLocation(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    type: Literal["approximate"] | None = None
    city: str | None = None
    region: str | None = None
    country: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTool:
    """The searches that a request allows. `allowed` and `blocked` are domains with their subdomains, or with a path."""

    max_uses: int = DEFAULT_USES
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    num_pages: int = DEFAULT_PAGES
    is_shown: bool = True  # whether the protocol has a place for the searches of a reply

    @property
    def suffix(self) -> str:
        """Return the text that narrows a query to the allowed domains, as most engines read it; empty for many.

        The pages that are found are compared with the domains in any case.
        """
        sites = " OR ".join(f"site:{domain}" for domain in self.allowed)
        if len(sites) > _MAX_SUFFIX:
            return ""
        return f" ({sites})" if len(self.allowed) > 1 else f" {sites}" if sites else ""

    def allows(self, url: str) -> bool:
        if self.allowed:
            return any(_is_in(url, domain) for domain in self.allowed)
        return not any(_is_in(url, domain) for domain in self.blocked)


def search_tool(
    *,
    max_uses: int | None = None,
    allowed: Sequence[str] = (),
    blocked: Sequence[str] = (),
    num_pages: int = DEFAULT_PAGES,
    param: str,
) -> SearchTool:
    """Check the search parameters of a request. Raises InvalidParameter."""
    if allowed and blocked:
        raise InvalidParameter(f"`{param}`: a search takes allowed or blocked domains, not both.", param=param)
    domains = (*allowed, *blocked)
    if len(domains) > _MAX_DOMAINS or not all(map(_is_domain, domains)):
        raise InvalidParameter(
            f"`{param}`: a search takes at most {_MAX_DOMAINS} domains, each as `example.com` or `example.com/path`.",
            param=param,
        )
    uses = min(DEFAULT_USES if max_uses is None else max_uses, MAX_USES)
    allowed, blocked = tuple(map(str.lower, allowed)), tuple(map(str.lower, blocked))
    return SearchTool(max_uses=uses, allowed=allowed, blocked=blocked, num_pages=num_pages)


def search_spec(place: UserLocation | None, param: str) -> ToolSpec:
    """Return the tool that the model calls. `place`: the location of the model's user."""
    description = "Search the web. The result lists pages, each with its title, its address and a summary."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for, in a few words."}},
        "required": ["query"],
    }
    places = () if place is None else (place.city, place.region, place.country, place.timezone)
    if where := ", ".join(filter(None, places)):
        description += f" The user is in: {where}."
    return ToolSpec(SEARCH_NAME, description, parameters, param=param)


def result_part(done: SearchDone) -> ToolResultPart:
    """Return the result as the model reads it, now and when the client sends it back."""
    if done.error is not None:
        return ToolResultPart(done.call_id, (TextPart(f"The search failed: {done.error}."),), SEARCH_NAME, True)
    text = "\n\n".join(_page_text(number, page) for number, page in enumerate(done.pages, 1))
    return ToolResultPart(done.call_id, (TextPart(text or "Nothing was found."),), SEARCH_NAME)


def split_searches(parts: Sequence[Part]) -> list[Message]:
    """Return the messages of an assistant's parts: each result of a search is one of the tool, which ends a message."""
    messages: list[Message] = []
    for is_result, group in groupby(parts, lambda part: isinstance(part, ToolResultPart)):
        if is_result:
            messages += [Message("tool", (part,)) for part in group]
        else:
            messages.append(Message("assistant", tuple(group)))
    return messages or [Message("assistant", ())]


def packed_search(done: SearchDone) -> str:
    """Return a search and its call as JSON, for clients that send both back as one item."""
    pages = [[page.url, page.title, page.text] for page in done.pages]
    return json.dumps([done.call_id, dict(done.arguments), pages, done.error], ensure_ascii=False)


def unpacked_search(text: str) -> tuple[ToolCallPart, ToolResultPart] | None:
    """Read a text of `packed_search`. Returns None for any other text."""
    try:
        match json_in(text):
            case [str(call_id), dict(arguments), list(rows), str() | None as error]:
                pages = tuple(FoundPage(*map(str, row)) for row in rows)
                done = SearchDone(call_id, "", pages, SEARCH_ERRORS[error] if error else None)
                return ToolCallPart(call_id, SEARCH_NAME, arguments), result_part(done)
    except (ValueError, TypeError, KeyError):
        pass
    return None


def _page_text(number: int, page: FoundPage) -> str:
    return "\n".join(line for line in (f"[{number}] {page.title}", page.url, page.text) if line)


def _is_domain(text: str) -> bool:
    host = text.partition("/")[0]
    return 0 < len(text) <= 253 and "." in host and not any(sign in text for sign in ' :?#@()*"\\') and text.isascii()


def _is_in(url: str, domain: str) -> bool:
    host, slash, path = domain.partition("/")
    parts = urlsplit(url)
    name = (parts.hostname or "").lower()
    return (name == host or name.endswith(f".{host}")) and (not slash or parts.path.lower().startswith(f"/{path}"))
