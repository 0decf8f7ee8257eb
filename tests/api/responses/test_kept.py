"""A stored response is what it was after it was written as JSON, in every state."""

import json
from typing import Any

import pytest
from hypothesis import given

from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.api.responses.replies import ResponseReply, response
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.api.responses.stored import StoredResponse, as_input, kept_input, stored
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import GenerationEvent

from ..events import THINKS_AND_CALLS, replies
from ..streams import alone, fold
from .bodies import spec
from .test_replies import EVERYTHING, PATCHES, patching

INPUT: Any = [
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "é🙂"}, {"type": "input_image", "image_url": "data:x"}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "done", "unknown": [1.5, None]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
]


def kept(events: list[GenerationEvent], **fields: Any) -> ResponseReply:
    stream = ResponseStream(spec(**fields))
    fold(stream, alone(events))
    return stream.reply


def check(reply: ResponseReply) -> None:
    body = ResponsesBody.model_validate({"input": INPUT})
    assert not isinstance(body.input, str)
    was = stored(kept_input(body.input, reply.id), reply, "resp_before")
    now = StoredResponse.of_value(json.loads(json.dumps(was.to_value())))
    assert now.reply.to_json() == was.reply.to_json() and now.reply == was.reply
    assert (now.response_id, now.output, now.input) == (was.response_id, was.output, was.input)
    assert (now.previous_id, now.num_bytes) == (was.previous_id, was.num_bytes)
    assert as_input(now.input) == as_input(was.input)


@given(replies())
def test_any_reply(events: list[GenerationEvent]) -> None:
    check(kept(events, **EVERYTHING))


@pytest.mark.parametrize("fields", [EVERYTHING, {"background": True}])
def test_one_with_reasoning_and_calls(fields: Any) -> None:
    check(kept(THINKS_AND_CALLS, **fields))


def test_one_with_a_custom_call() -> None:
    check(kept(patching('{"input": "*** Begin"}'), **PATCHES))


def test_one_that_runs_or_has_failed() -> None:
    check(response(spec(), "in_progress"))
    check(response(spec(), "failed", error=GenerationError("It failed.")))
