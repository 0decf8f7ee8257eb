"""What stands between real clients and the server: hands on every byte, and fails only where it is told to."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from scripts._accept_clients.faults import FAULTS, Cut, Fault, Refuse
from scripts._accept_clients.outside import walled_in
from scripts._accept_clients.relay import Relay, Seen, relaying
from tests.support.running import Running, serving

from .fakes import FakeEngine, says

TOOLS: Any = [{"name": "ls", "input_schema": {"type": "object"}}]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine(play=lambda request, index: says("a", "b", "c"))) as running:
        yield running


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


def test_a_refusal_hits_the_requests_it_is_meant_for(server: Running) -> None:
    relay = Relay(server.url, Fault("busy", Refuse(429, 2), first=1))
    with relaying(relay) as url, anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        client.messages.create(**ASK)
        client.messages.create(**{**ASK, "tools": []})
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**ASK)
        client.messages.create(**ASK)
    assert caught.value.response.headers["retry-after"] == "2"
    assert [each.fault for each in relay.seen] == [None, None, "busy", None]


def test_too_long_is_said_in_each_protocol_s_words(server: Running) -> None:
    fault = Fault("long", Refuse(0), times=2)
    with relaying(Relay(server.url, fault)) as url:
        with (
            anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
            pytest.raises(anthropic.BadRequestError, match="prompt is too long: 33000 tokens > 32768 maximum"),
        ):
            client.messages.create(**ASK)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as vendor,
            pytest.raises(openai.BadRequestError, match="maximum context length is 32768 tokens"),
        ):
            vendor.responses.create(model="tiny", input="hi", tools=[{"type": "function", "name": "f"}])


@pytest.mark.parametrize("is_abrupt", [True, False])
def test_a_stream_is_cut(server: Running, is_abrupt: bool) -> None:
    relay = Relay(server.url, Fault("cut", Cut(3, is_abrupt)))
    with relaying(relay) as url, httpx.Client(trust_env=False) as client:
        if is_abrupt:
            with pytest.raises(httpx.RemoteProtocolError):
                client.post(f"{url}/v1/messages", json={**ASK, "stream": True})
        else:
            text = client.post(f"{url}/v1/messages", json={**ASK, "stream": True}).text
            assert text.count("event: ") == 3 and "message_stop" not in text
    assert [each.end for each in relay.seen] == ["cut"]


def test_nobody_gets_through_the_wall() -> None:
    wanted: list[str] = []
    with walled_in(wanted) as environment:
        mounts = {"https://": httpx.HTTPTransport(proxy=environment["HTTPS_PROXY"])}
        with httpx.Client(mounts=mounts, trust_env=False) as client, pytest.raises(httpx.ProxyError):
            client.get("https://example.org/")
    assert wanted == ["example.org:443"]


def test_the_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


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
