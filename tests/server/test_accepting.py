"""The relay between real clients and the server hands on every byte and notes every request."""

from typing import Any

import httpx
import pytest

from scripts._accept_clients.ending import walled_in
from scripts._accept_clients.relay import Relay, Seen, relaying
from tests.support.running import Running

TOOLS: Any = [{"name": "ls", "input_schema": {"type": "object"}}]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


def test_what_is_handed_on_is_what_was_sent(server: Running) -> None:
    relay = Relay(server.url)
    body = {**ASK, "stream": True}
    with relaying(relay) as url, httpx.Client(trust_env=False) as client:
        through = client.post(f"{url}/v1/messages?beta=true", json=body)
        straight = client.post(f"{server.url}/v1/messages?beta=true", json=body)
        assert client.head(f"{url}/api/hello").status_code == 200
    assert [line.partition('"id"')[0] for line in through.text.splitlines()] == [
        line.partition('"id"')[0] for line in straight.text.splitlines()
    ]
    first, second = relay.seen
    assert (first.body, first.status, first.end, first.is_main, first.num_errors) == (body, 200, "complete", True, 0)
    assert (second.method, second.is_main) == ("HEAD", False)


def test_nobody_gets_through_the_wall() -> None:
    wanted: list[str] = []
    with walled_in(wanted) as environment:
        mounts = {"https://": httpx.HTTPTransport(proxy=environment["HTTPS_PROXY"])}
        with httpx.Client(mounts=mounts, trust_env=False) as client, pytest.raises(httpx.ProxyError):
            client.get("https://example.org/")
    assert wanted == ["example.org:443"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}),
    ],
)
def test_results_are_found_in_every_protocol(path: str, body: Any) -> None:
    assert len(Seen(0, "POST", path, body).results) == 1
    assert Seen(0, "POST", path, {"input": "x", "messages": [{"role": "user", "content": "x"}]}).results == []
