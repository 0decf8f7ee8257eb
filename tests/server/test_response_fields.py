"""A response says what was used: its settings as they were applied, in every snapshot."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.events import Finished, ReasoningDelta, Started, TextDelta, TokenLogprob

from .fakes import FakeEngine, says

RESPONSES = "/v1/responses"
TOOL: Any = {"type": "function", "name": "ls"}
SCHEMA: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


def snapshots(http: Any, **fields: Any) -> list[Any]:
    """The response whole, as it is stored, and in each event of a stream."""
    whole = http.post(RESPONSES, json={"input": "hi", **fields}).json()
    streamed = http.post(RESPONSES, json={"input": "hi", "stream": True, **fields}).text
    found = [event["response"] for event in events_of(streamed.splitlines()) if "response" in event]
    queued = http.post(RESPONSES, json={"input": "hi", "background": True, **fields}).json()
    return [whole, http.get(f"{RESPONSES}/{whole['id']}").json(), queued, *found]


def test_what_a_request_leaves_out_is_told(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "info", replace(engine.info, temperature=0.6, top_p=0.95))
    for response in snapshots(http, tools=[TOOL]):
        assert response | {
            "temperature": 0.6, "top_p": 0.95, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0,
            "max_tool_calls": None, "service_tier": "default", "safety_identifier": None, "prompt_cache_key": None,
            "user": None, "tools": [{**TOOL, "description": None, "parameters": None, "strict": False}],
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled",
        } == response  # fmt: skip
        is_complete = response["status"] == "completed"
        assert (response["completed_at"] is not None) == is_complete
        assert not is_complete or response["completed_at"] >= response["created_at"]


def test_what_a_request_asks_for_is_told(http: httpx.Client) -> None:
    fields: Any = {
        "temperature": 0.0, "top_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": -1.0, "max_tool_calls": 3,
        "safety_identifier": "s", "prompt_cache_key": "k", "user": "u",
        "tools": [{**TOOL, "description": "x", "parameters": {"type": "object"}, "strict": True}],
    }  # fmt: skip
    for response in snapshots(http, **fields, text={"format": SCHEMA, "verbosity": "low"}):
        assert response | fields == response
        assert response["text"] == {"format": {**SCHEMA, "description": None, "strict": True}, "verbosity": "low"}


def test_errors_of_messages_name_their_request(http: httpx.Client) -> None:
    for path, body in (("messages", {}), ("messages/nowhere", {}), ("messages", [])):
        refused = http.post(f"/v1/{path}", json=body)
        assert refused.json()["request_id"] == refused.headers["request-id"]


FIRST, SECOND = TokenLogprob(72, -0.5, ((72, -0.5), (65, -1.5))), TokenLogprob(105, -0.25, ((105, -0.25),))


def with_logprobs(request: Any, index: int) -> Any:
    """Two tokens whose text comes with the second, then a third in a block of its own."""
    end = says()[-1]
    assert isinstance(end, Finished)
    return (
        Started(7, 2),
        TextDelta("", (FIRST,)),
        TextDelta("Hi", (SECOND,)),
        ReasoningDelta("why"),
        TextDelta("H", (FIRST,)),
        end,
    )


def test_log_probabilities_where_they_are_asked_for(http: httpx.Client, engine: FakeEngine) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    engine.play = with_logprobs
    whole = http.post(RESPONSES, json={"input": "hi", **asked}).json()
    sent = list(events_of(http.post(RESPONSES, json={"input": "hi", "stream": True, **asked}).text.splitlines()))
    kept = http.get(f"{RESPONSES}/{whole['id']}").json()
    assert http.post(RESPONSES, json={"input": "hi", "top_logprobs": 2}).status_code == 400
    plain = http.post(RESPONSES, json={"input": "hi"}).json()
    assert [request.sampling.logprobs for request in engine.requests] == [2, 2, None]
    first, second = (item["content"][0]["logprobs"] for item in whole["output"] if item["type"] == "message")
    assert [(each["token"], each["logprob"]) for each in (*first, *second)] == [("H", -0.5), ("i", -0.25), ("H", -0.5)]
    assert first[0]["top_logprobs"][1] == {"token": "A", "logprob": -1.5, "bytes": [65]}
    assert [event["logprobs"] for event in sent if event["type"] == "response.output_text.delta"] == [first, second]
    assert [event["logprobs"] for event in sent if event["type"] == "response.output_text.done"] == [first, second]
    parts = [[item["content"] for item in found["output"]] for found in (whole, kept, sent[-1]["response"])]
    assert parts[0] == parts[1] == parts[2] and plain["top_logprobs"] == 0 and whole["top_logprobs"] == 2


def test_a_token_without_text_at_the_end_has_its_log_probability(http: httpx.Client, engine: FakeEngine) -> None:
    *start, end = says()
    engine.play = lambda request, index: (*start, TextDelta("", (FIRST,)), end)
    whole = http.post(RESPONSES, json={"input": "hi", "include": ["message.output_text.logprobs"]}).json()
    assert [each["token"] for each in whole["output"][-1]["content"][0]["logprobs"]] == ["H"]
