"""Behaviour that all protocols share, with an adapter each. `tests/golden` has the bytes of replies and refusals."""

import httpx
import pytest

from tests.support.protocols import PROTOCOLS
from tests.support.running import serving
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.errors import ContextLengthExceeded, Overloaded
from vllm_mlx.core.events import PromptProgress, ReasoningDelta, Started, TextDelta
from vllm_mlx.core.request import Request

from .fakes import PROMPT_TOKENS, FakeEngine, Pause, Script, finished


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_reply_has_the_id_of_its_request_and_the_name_that_was_asked_for(
    http: httpx.Client, engine: FakeEngine, name: str
) -> None:
    reply = http.post(PROTOCOLS[name].path, json=PROTOCOLS[name].body("hi", model="alias")).json()
    assert (reply["id"], reply["model"]) == (engine.requests[-1].request_id, "alias")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_likeliest_token_alone_may_be_asked_for(http: httpx.Client, engine: FakeEngine, name: str) -> None:
    """`top_p` 0 is within the vendors' limits."""
    protocol = PROTOCOLS[name]
    statuses = [http.post(protocol.path, json=protocol.body("hi", top_p=value)).status_code for value in (0, -0.1)]
    assert statuses == [200, 400] and [request.sampling.top_p for request in engine.requests] == [0]


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_refused_before_any_stream(
    http: httpx.Client, engine: FakeEngine, name: str, stream: bool
) -> None:
    path, body = PROTOCOLS[name].path, PROTOCOLS[name].body("hi", stream=stream)
    engine.refuse = ContextLengthExceeded(num_prompt_tokens=600, max_model_len=512)
    assert http.post(path, json=body).status_code == 400
    engine.refuse = Overloaded("Too many requests wait.", retry_after_s=1.2)
    refused = http.post(path, json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_silence_is_broken_before_the_prompt_in_hidden_reasoning_and_in_the_text(name: str) -> None:
    """The engine goes on when the client has read so many signs of life."""
    protocol, seen = PROTOCOLS[name], list[str]()

    def after(number: int) -> Pause:
        return Pause(until=lambda: seen.count("sign") >= number)

    def play(request: Request, index: int) -> Script:
        begun = (after(2), Started(PROMPT_TOKENS, 2), PromptProgress(3, PROMPT_TOKENS), after(4), ReasoningDelta("h"))
        return (*begun, after(6), TextDelta("a"), after(8), finished())

    body = protocol.body("hi", **protocol.hides_reasoning, stream=True)
    with (
        serving(FakeEngine(play), keep_alive_s=0.05) as server,
        server.http() as client,
        client.stream("POST", protocol.path, json=body) as reply,
    ):
        for event in events_of(reply.iter_lines()):
            seen.append("sign" if protocol.is_sign_of_life(event) else protocol.event_text(event))
    assert (seen[0] == "sign") == (name == "completions")  # the others begin with an event of their own
    assert "".join(word for word in seen if word != "sign") in ("a", "ha")
    at = seen.index("a")
    assert seen[:at].count("sign") >= 6 and "sign" in seen[at:]
