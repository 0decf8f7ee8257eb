"""The search server is asked within its limits, and pages of other networks are never shown."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from vllm_mlx.server.search_client import SearchClient, SearchFailed, is_shown

from .searx import PAGES, Searx, searx


@pytest.fixture
def web() -> Iterator[Searx]:
    with searx() as found:
        yield found


def search(client: SearchClient, query: str = "news") -> list[str]:
    return [page.url for page in asyncio.run(client.search(query))]


@pytest.mark.parametrize("events", [False, True])
def test_an_mcp_server_is_asked_within_a_session(web: Searx, events: bool) -> None:
    web.events = events
    shown = [PAGES[0]["url"], PAGES[2]["url"]]
    for answer in (
        {"structuredContent": {"results": PAGES}},
        {"content": [{"type": "text", "text": json.dumps(PAGES)}]},
    ):
        web.mcp, web.sessions[:] = answer, []
        assert search(SearchClient(f"{web.url}/mcp")) == shown
        assert web.sessions == [None, "s1", "s1", "s1"] and web.queries[-1] == "news"
    web.mcp = {"content": [{"type": "text", "text": "1. Title (https://a.example.org/x)\nWords"}]}
    [page] = asyncio.run(SearchClient(f"{web.url}/mcp").search("news"))
    assert page.url == "https://a.example.org/x" and page.text.endswith("Words")
    web.is_hasty = True
    assert len(asyncio.run(SearchClient(f"{web.url}/mcp").search("news"))) == 1, "the answer came before"
    for answer in ({"isError": True, "content": []}, 5):
        web.mcp, num_ended = answer, web.num_ended
        with pytest.raises(SearchFailed):
            search(SearchClient(f"{web.url}/mcp"))
        assert web.num_ended == num_ended + 1, "the session is ended also after a failure"


def test_queries_are_checked_before_they_are_sent(web: Searx) -> None:
    for query, error in (("", "invalid_tool_input"), ("x" * 1001, "query_too_long")):
        with pytest.raises(SearchFailed, match=error):
            search(SearchClient(web.url), query)
    assert web.queries == []
    with pytest.raises(SearchFailed, match="unavailable"):
        search(SearchClient("http://127.0.0.1:9"))


def test_pages_of_other_networks_are_not_shown() -> None:
    assert is_shown("https://example.org/a?b#c") and is_shown("http://93.184.216.34/")
    private = [
        "http://10.0.0.1/",
        "http://[::1]/",
        "http://localhost/",
        "http://a.local/",
        "http://nas.lan/",
        "file:///",
        "x",
    ]
    for url in (*private, "http://169.254.169.254/", "http://u:p@example.org/", "http://0x7f000001/", "http://[bad/"):
        assert not is_shown(url), url
