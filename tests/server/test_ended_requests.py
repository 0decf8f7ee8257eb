"""A request that was cancelled or took too long is not sent again: what Codex and the vendors' packages go by."""

from typing import Any

import httpx
import pytest

from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.errors import Cancelled, InvalidParameter, ShuttingDown, TimeLimit, VLLMMLXError
from vllm_mlx.core.events import Failed, ReasoningDelta, Started, TextDelta, ToolCallDelta, ToolCallStart
from vllm_mlx.core.request import Request

from .fakes import FakeEngine, Pause

RESPONSES = "/v1/responses"
ENDED = [Cancelled(), TimeLimit("It took too long."), InvalidParameter("It is wrong.", param="input")]


def half(error: VLLMMLXError) -> Any:
    def play(request: Request, index: int) -> Any:
        call = (ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"a'))
        return (Started(7, 2), ReasoningDelta("why"), TextDelta("Hel"), TextDelta("lo"), *call, Failed(error))

    return play


def events(text: str) -> list[Any]:
    return list(events_of(text.splitlines()))


@pytest.mark.parametrize("error", ENDED)
def test_a_status_and_a_code_after_which_codex_ends_its_turn(
    http: httpx.Client, engine: FakeEngine, error: VLLMMLXError
) -> None:
    """`tests/golden` has the statuses of the other protocols."""
    engine.refuse = error
    for fields in ({}, {"stream": True}):
        refused = http.post(RESPONSES, json={"input": "hi", **fields})
        assert refused.status_code == 400 and refused.json()["error"]["code"]
    engine.play, engine.refuse = half(error), None
    assert http.post(RESPONSES, json={"input": "hi"}).status_code == 400
    *_, last = events(http.post(RESPONSES, json={"input": "hi", "stream": True}).text)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "invalid_prompt")


TALK: tuple[Any, ...] = (Started(7, 2), ReasoningDelta("why"), TextDelta("Hello"))
CALL: tuple[Any, ...] = (ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"a'))


@pytest.mark.parametrize("error", [ENDED[0], ShuttingDown()])
@pytest.mark.parametrize("written", [(), (TALK[0], *CALL), (*TALK, *CALL)])
def test_claude_code_sends_no_message_again_and_runs_no_cut_call(
    http: httpx.Client, engine: FakeEngine, error: VLLMMLXError, written: Any
) -> None:
    """It asks again, without a stream, unless a block has ended; and it runs each call whose block has ended."""
    played = (*written, Pause(until=lambda: head), Failed(error))
    head: list[bool] = []
    engine.play = lambda request, index: played
    body: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with http.stream("POST", "/v1/messages", json=body) as reply:
        head.append(True)
        sent = list(events_of(reply.iter_lines()))
    started = {each["index"]: each["content_block"] for each in sent if each["type"] == "content_block_start"}
    ended = [started[each["index"]]["type"] for each in sent if each["type"] == "content_block_stop"]
    talk = ["thinking", "text"][: sum(isinstance(each, ReasoningDelta | TextDelta) for each in written)]
    is_final = error in ENDED
    assert ended == (talk or ["text"] * is_final)
    assert sent[-1]["type"] == "error" and (sent[0]["type"] == "message_start") == (is_final or written != ())
    assert list(started) == list(range(len(started)))


def test_a_failed_response_keeps_its_text_and_ends_all_but_a_cut_call(http: httpx.Client, engine: FakeEngine) -> None:
    engine.play = half(ENDED[0])
    sent = events(http.post(RESPONSES, json={"input": "hi", "stream": True}).text)
    failed = sent[-1]["response"]
    kept = http.get(f"{RESPONSES}/{failed['id']}").json()
    stored = http.post(RESPONSES, json={"input": "hi", "background": True}).json()["id"]
    while (later := http.get(f"{RESPONSES}/{stored}").json())["status"] == "in_progress":
        pass
    added = [event["item"]["id"] for event in sent if event["type"] == "response.output_item.added"]
    done = [event["item"]["id"] for event in sent if event["type"] == "response.output_item.done"]
    assert added == [*done, failed["output"][-1]["id"]] == [item["id"] for item in failed["output"]] and len(done) == 2
    for response in (failed, kept, later):
        assert (response["status"], response["completed_at"]) == ("failed", None)
        assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
        assert response["output"][1]["content"][0]["text"] == "Hello"
