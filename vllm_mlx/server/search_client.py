"""Asks the operator's search server: SearXNG by its JSON, or the search tool of an MCP server. Knows no request.

Its answers are bounded in bytes, pages, characters and seconds. The pages themselves are never fetched.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from .. import __version__
from ..api.text import json_in, well_formed
from ..core.events import FoundPage, SearchError
from ..media.fetch import is_public

MAX_QUERY_CHARS = 1_000
_SEARCH_S = 20.0
_MAX_BYTES = 2_000_000  # limit of one answer
_MAX_CHARS = 4_000  # text about one page
_MAX_FREE_CHARS = 20_000  # an answer that is one text
_MAX_TITLE_CHARS = 300
_MAX_URL_CHARS = 2_000
_MAX_ROWS = 100
_AT_ONCE = 8
_MCP_VERSION = "2025-06-18"
_URL = re.compile(r"https?://[^\s<>\"')\]]+")
_LOCAL = (".local", ".localhost", ".internal", ".home.arpa", ".home", ".lan", ".corp")
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError, AttributeError)


logger = logging.getLogger(__name__)


class SearchFailed(Exception):
    def __init__(self, error: SearchError):
        super().__init__(error)
        self.error: SearchError = error


class SearchClient:
    """Searches on one event loop."""

    def __init__(self, url: str):
        """Make a client. `url`: the address of an MCP server if its path ends in `/mcp`, otherwise of a SearXNG."""
        self._url = url.rstrip("/")
        self._is_mcp = urlsplit(url).path.rstrip("/").endswith("/mcp")
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def search(self, query: str, suffix: str = "") -> tuple[FoundPage, ...]:
        """Return the pages in the order of the answer, each once. `suffix` is added to the query. Raises SearchFailed.

        The log says why the search server gave no pages; the client and the model read a code.
        """
        if not query.strip():
            raise SearchFailed("invalid_tool_input")
        if len(query) > MAX_QUERY_CHARS:
            raise SearchFailed("query_too_long")
        try:
            async with asyncio.timeout(_SEARCH_S), self._places, _http() as http:
                ask = self._ask_mcp if self._is_mcp else self._ask_searxng
                rows = await ask(http, query + suffix)
        except TimeoutError:
            logger.warning("The search server %s did not answer within %g s", self._url, _SEARCH_S)
            raise SearchFailed("unavailable") from None
        except httpx.HTTPStatusError as error:
            logger.warning("The search server %s answered with status %d", self._url, error.response.status_code)
            is_busy = error.response.status_code == 429
            raise SearchFailed("too_many_requests" if is_busy else "unavailable") from error
        except _FAILURES as error:
            logger.warning("The search server %s gave an unreadable answer: %r", self._url, error)
            raise SearchFailed("unavailable") from error
        pages = {row.url: row for row in reversed(rows) if is_shown(row.url)}
        return tuple(reversed(pages.values()))

    async def _ask_searxng(self, http: httpx.AsyncClient, query: str) -> list[FoundPage]:
        url = self._url if self._url.endswith("/search") else f"{self._url}/search"
        _, body = await _answer(http, "GET", url, params={"q": query, "format": "json"})
        answer = json_in(body)
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
            raise ValueError("it has no list of results")
        return list(_pages(answer))

    async def _ask_mcp(self, http: httpx.AsyncClient, query: str) -> list[FoundPage]:
        async with _McpSession(http, self._url) as session:
            name, argument = _search_of(await session.call("tools/list", {}))
            result = await session.call("tools/call", {"name": name, "arguments": {argument: query}})
        if result.get("isError"):
            raise ValueError("its tool reports an error")
        texts = [part["text"] for part in result.get("content", ()) if part.get("type") == "text"]
        for value in (result.get("structuredContent"), *map(_json, texts)):
            if pages := list(_pages(value)):
                return pages
        return _free_pages("\n\n".join(texts), query)


class _McpSession:
    """MCP over streamable HTTP: one request each, answered by JSON or by one event of a stream."""

    def __init__(self, http: httpx.AsyncClient, url: str):
        self._http = http
        self._url = url
        self._headers = {"accept": "application/json, text/event-stream"}
        self._number = 0

    async def __aenter__(self) -> Self:
        client = {"name": "vllm-mlx", "version": __version__}
        given = {"protocolVersion": _MCP_VERSION, "capabilities": {}, "clientInfo": client}
        result = await self.call("initialize", given)
        self._headers["mcp-protocol-version"] = str(result.get("protocolVersion", _MCP_VERSION))[:40]
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the session, unless there is no time left. The answer counts even if the session cannot be ended."""
        if "mcp-session-id" in self._headers and (kind is None or issubclass(kind, Exception)):
            with suppress(httpx.HTTPError):
                await self._http.delete(self._url, headers=self._headers)

    async def call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method and return its result. Raises one of `_FAILURES`."""
        self._number += 1
        body = await self._post({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        for message in _messages(body):
            if message.get("id") == self._number:
                return dict(message["result"])
        raise ValueError("the call was not answered")

    async def _post(self, message: Mapping[str, Any]) -> str:
        headers, body = await _answer(self._http, "POST", self._url, json=message, headers=self._headers)
        if session := headers.get("mcp-session-id"):
            self._headers["mcp-session-id"] = session
        return body


_certificates = cache(httpx.create_ssl_context)  # all searches use them: to read them keeps the event loop busy


def _http() -> httpx.AsyncClient:
    """Return a client that follows no redirect, and uses no proxy of the environment."""
    headers = {"user-agent": f"vllm-mlx/{__version__}"}
    return httpx.AsyncClient(trust_env=False, timeout=_SEARCH_S, headers=headers, verify=_certificates())


async def _answer(http: httpx.AsyncClient, method: str, url: str, **options: Any) -> tuple[httpx.Headers, str]:
    async with http.stream(method, url, **options) as response:
        if not response.is_success:
            response.raise_for_status()
            raise ValueError("it answered with a redirect")
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _MAX_BYTES:
                raise ValueError("its answer is too long")
        return response.headers, body.decode("utf-8", "replace")


def _messages(body: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON-RPC messages of an answer: JSON, or the data of events."""
    if body.lstrip().startswith("{"):
        yield json_in(body)
        return
    for event in body.replace("\r\n", "\n").split("\n\n"):
        data = [line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:")]
        if data:
            yield json_in("\n".join(data))


def _search_of(tools: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of the tool that searches, and of its argument. Raises ValueError."""
    for tool in tools["tools"]:
        arguments = tool.get("inputSchema", {}).get("properties", {})
        for argument in ("query", "q"):
            if "search" in tool["name"].lower() and argument in arguments:
                return str(tool["name"]), argument
    raise ValueError("it has no tool that searches")


def _json(text: str) -> Any:
    try:
        return json_in(text)
    except json.JSONDecodeError:
        return None


def _pages(value: Any) -> Iterator[FoundPage]:
    """Yield the pages in a list of objects, or in the list `results` of an object."""
    rows = value.get("results") if isinstance(value, dict) else value
    for row in rows[:_MAX_ROWS] if isinstance(rows, list) else ():
        if isinstance(row, dict):
            url, title = row.get("url") or row.get("link"), row.get("title")
            texts = (row.get(name) for name in ("content", "snippet", "description", "text"))
            text = next((text for text in texts if isinstance(text, str)), "")
            if isinstance(url, str) and len(url) <= _MAX_URL_CHARS:
                yield FoundPage(url, _line(title if isinstance(title, str) else url), _line(text, _MAX_CHARS))


def _free_pages(text: str, query: str) -> list[FoundPage]:
    """Turn an answer in words into one page, at the first address in it."""
    found = _URL.search(text)
    if not text.strip() or found is None or len(found[0]) > _MAX_URL_CHARS:
        return []
    return [FoundPage(found[0], _line(f"Results for: {query}"), well_formed(text.strip()[:_MAX_FREE_CHARS]))]


def _line(text: str, max_chars: int = _MAX_TITLE_CHARS) -> str:
    return well_formed(" ".join(text[: 2 * max_chars].split())[:max_chars])


def is_shown(url: str) -> bool:
    """Return whether a model may see the page: its address must be one of the public internet."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".").lower()
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or parts.username is not None or port == 0:
        return False
    if ":" in host or host.replace(".", "").isdecimal():
        return is_public(host)
    return "." in host and not host.endswith(_LOCAL)
