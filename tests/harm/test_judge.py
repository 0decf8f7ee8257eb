"""What counts as a fault, and what does not."""

from dataclasses import replace

import pytest

from tests.support.harm.driver import Attack, Observation
from tests.support.harm.heartbeat import Seen
from tests.support.harm.judge import MB, Limits, faults_of_answer, judge
from tests.support.harm.wire import JSON, Answer, Outcome, Shot

OPENAI = b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}'
ANTHROPIC = b'{"type":"error","error":{"type":"invalid_request_error","message":"No."}}'
SSE = "text/event-stream; charset=utf-8"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ATTACK = Attack("attack", CHAT, (Shot((b"x" * 1000,)),))
BENIGN = Attack("benign", CHAT, (Shot((b"x" * 1000,)),))


def seen(
    *, health_s: float = 0.01, cpu_s: float = 0.1, kept_mb: int = 0, left: tuple[str, ...] = (), own_s: float = 0.0
) -> Observation:
    answers = (Outcome((Answer(400, JSON, OPENAI),)),)
    before = 100 * MB
    return Observation(
        answers, Seen([health_s], own_delay_s=own_s), 1, cpu_s, 0.1, before, before, before + kept_mb * MB, left
    )


@pytest.mark.parametrize(
    ("status", "content_type", "body", "path", "expected"),
    [
        (400, JSON, OPENAI, CHAT, []),
        (400, JSON, OPENAI, MESSAGES, ["envelope"]),
        (429, JSON, ANTHROPIC, MESSAGES, []),
        (400, JSON, ANTHROPIC, CHAT, ["envelope"]),
        (400, "text/plain", b"Invalid HTTP request received.", CHAT, ["envelope"]),
        (500, JSON, OPENAI, CHAT, ["internal error"]),
        (503, JSON, OPENAI, CHAT, []),
        (200, JSON, b"{}", CHAT, []),
        (200, SSE, b'data: {"a":1}\n\ndata: [DONE]\n\n', CHAT, []),
        (200, SSE, b'data: {"a":1}\n\n', CHAT, ["stream without an end"]),
        (200, SSE, b'data: {"error":{"message":"x","type":"server_error"}}\n\n', CHAT, ["internal error"]),
        (200, SSE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', MESSAGES, []),
        (200, SSE, b"event: response.completed\ndata: {}\n\n", "/v1/responses", []),
    ],
)
def test_answers_are_judged(status: int, content_type: str, body: bytes, path: str, expected: list[str]) -> None:
    assert [fault.limit for fault in faults_of_answer(Answer(status, content_type, body), path)] == expected


def judged(attacks: list[Observation], benign: list[Observation]) -> list[str]:
    left = {ATTACK.name: iter(attacks), BENIGN.name: iter(benign)}
    faults, first = judge(ATTACK, BENIGN, lambda attack: next(left[attack.name]), Limits(), None)
    assert first is attacks[0]
    return [fault.limit for fault in faults]


@pytest.mark.parametrize(
    ("attacks", "benign", "faults"),
    [
        pytest.param([seen(health_s=0.5, cpu_s=0.6)] * 3, [seen()] * 3, ["event loop"], id="each time"),
        pytest.param([seen(health_s=0.5)] * 3, [seen()] * 3, [], id="short, without work of the server"),
        pytest.param([seen(health_s=5.0)] * 3, [seen()] * 3, ["event loop"], id="long, without work"),
        pytest.param([seen(health_s=0.5, cpu_s=0.6, own_s=0.45)] * 3, [seen()] * 3, [], id="of the heartbeat"),
        pytest.param([seen(health_s=0.5, cpu_s=0.6, own_s=0.05)] * 3, [seen()] * 3, ["event loop"], id="of the loop"),
        pytest.param([seen(health_s=1.0, cpu_s=1.0), seen()], [seen()] * 2, [], id="once"),
        pytest.param([seen(health_s=0.3)], [seen(health_s=0.25)], [], id="benign requests cause it too"),
        pytest.param([seen(kept_mb=80), seen(kept_mb=70), seen(kept_mb=1)], [seen()] * 3, [], id="memory comes back"),
        pytest.param([seen(kept_mb=80)] * 3, [seen()] * 3, ["memory kept"], id="memory is kept"),
        pytest.param([seen(left=("requests: 1",))], [seen()], ["left behind"], id="left behind"),
    ],
)
def test_what_comes_each_time_and_is_not_the_machine_s_counts(
    attacks: list[Observation], benign: list[Observation], faults: list[str]
) -> None:
    assert judged(attacks, benign) == faults


def test_a_missing_answer_counts_where_the_request_was_whole() -> None:
    found = replace(seen(), outcomes=(Outcome((), "no answer came in time"),))
    assert judged([found], [seen()]) == ["no answer"]
    dropped = replace(ATTACK, shots=(replace(ATTACK.shots[0], must_answer=False),))
    faults, _ = judge(dropped, BENIGN, lambda attack: found if attack is dropped else seen(), Limits(), None)
    assert faults == []
