"""The law: what no request may do to anybody else. Compares an attack with benign requests of the same size.

Times are noisy and only ever too long, so a limit counts as exceeded only if it is exceeded again each time.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .driver import Attack, Observation
from .wire import Answer, Outcome, Shot

REPEATS = 3
MB = 1 << 20
UNSEEN_S = 1.0  # a server that waits, as for a file, does no work: longer delays than this count without any
_FAILED = (b'"server_error"', b'"internal_error"', b'"api_error"', b'"generation_failed"')
_ENDS = (b"data: [DONE]", b"event: message_stop", b'"type":"error"', b'"error":{')
_RESPONSE_ENDS = tuple(f"event: response.{end}".encode() for end in ("completed", "incomplete", "failed"))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an attack may cost above benign requests, beside what it may never do."""

    loop_s: float = 0.1  # the longest `/health`
    gap_s: float = 1.0  # between two tokens of somebody else's stream
    ttft_s: float = 1.5  # to the first token of somebody else's chat
    kept_bytes: int = 64 * MB  # memory that does not come back
    peak_bytes: int = 128 * MB
    peak_factor: float = 8.0  # beside, for each byte that was sent


@dataclass(frozen=True, slots=True)
class Fault:
    """One limit that was exceeded."""

    limit: str
    detail: str

    def __str__(self) -> str:
        return f"{self.limit}: {self.detail}"


def judge(
    attack: Attack, benign: Attack, observe: Callable[[Attack], Observation], limits: Limits, usual: Observation | None
) -> tuple[list[Fault], Observation]:
    """All faults of an attack, and its first observation. `usual`: an earlier observation of `benign`.

    Where something seems exceeded, benign and attack are tried again in turns.
    """
    first = observe(attack)
    faults = list(absolute_faults(attack, first))
    usual = observe(benign) if usual is None else usual
    suspects = exceeded([first], [usual], limits, attack)
    found, normal = [first], []
    while suspects and not faults and len(found) < REPEATS:
        normal.append(observe(benign))
        found.append(observe(attack))
        suspects = exceeded(found, normal, limits, attack)
    return faults + suspects, first


def exceeded(found: list[Observation], normal: list[Observation], limits: Limits, attack: Attack) -> list[Fault]:
    """The least of what attacks did, against the median of what benign requests did.

    A heartbeat that was late itself saw the machine's delay, not the server's.
    """
    peak_bytes = limits.peak_bytes + limits.peak_factor * attack.num_bytes + attack.pixel_bytes
    measures: tuple[tuple[str, Callable[[Observation], float], float, float, str], ...] = (
        ("event loop", lambda each: each.loop_delay_s - each.seen.own_delay_s, limits.loop_s, 1, "s"),
        ("somebody else's stream", lambda each: each.gap_s, limits.gap_s, 1, "s between tokens"),
        ("somebody else's chat", lambda each: each.ttft_s, limits.ttft_s, 1, "s to the first token"),
        ("memory kept", lambda each: each.after_bytes - each.before_bytes, limits.kept_bytes, MB, "MB"),
        ("memory peak", lambda each: each.peak_bytes - each.before_bytes, peak_bytes, MB, "MB"),
    )
    faults = []
    for name, measure, allowed, unit, noun in measures:
        least = min(measure(each) for each in found)
        usual = statistics.median(measure(each) for each in normal)
        excess = least - max(usual, 0)
        if excess > allowed and (unit != 1 or _is_the_server_s(excess, found, normal)):
            figures = f"{least / unit:.3g} {noun}; benign {usual / unit:.3g}, at most {allowed / unit:.3g} above"
            faults.append(Fault(name, f"{figures}; {_cpu(found, normal)}"))
    return faults


def _is_the_server_s(excess_s: float, found: list[Observation], normal: list[Observation]) -> bool:
    """Short delays without any work of the server are the machine's."""
    work_s = min(each.cpu_s for each in found) - statistics.median(each.cpu_s for each in normal)
    return excess_s > UNSEEN_S or work_s > excess_s / 2


def _cpu(found: list[Observation], normal: list[Observation]) -> str:
    """A steadier measure than time on a busy machine."""
    rows = [(min(each.cpu_s for each in some), min(each.loop_cpu_s for each in some)) for some in (found, normal)]
    (cpu_s, loop_s), (usual_s, usual_loop_s) = rows
    return f"CPU {cpu_s:.2f} s (benign {usual_s:.2f}), of the event loop {loop_s:.2f} s (benign {usual_loop_s:.2f})"


def absolute_faults(attack: Attack, found: Observation) -> Iterator[Fault]:
    """What is a fault whatever benign requests do."""
    for shot, outcome in zip(attack.shots, found.outcomes, strict=True):
        yield from _of_outcome(shot, outcome, attack.path)
    for left in found.left:
        yield Fault("left behind", left)
    for fault in found.seen.faults:
        yield Fault("other clients", fault)


def _of_outcome(shot: Shot, outcome: Outcome, path: str) -> Iterator[Fault]:
    if outcome.missing is not None and shot.must_answer and len(outcome.answers) < shot.num_answers:
        yield Fault("no answer", f"{len(outcome.answers)} of {shot.num_answers}, {outcome.missing}")
    for answer in outcome.answers:
        yield from faults_of_answer(answer, path)


def faults_of_answer(answer: Answer, path: str) -> Iterator[Fault]:
    """Internal errors, refusals without the envelope of their protocol, streams without an end."""
    if answer.status >= 500 and answer.status != 503:
        yield Fault("internal error", f"{answer.status} {_words(answer.body)}")
    elif answer.status >= 400:
        if not has_envelope(answer.body, path):
            yield Fault("envelope", f"{answer.status} {answer.content_type}: {_words(answer.body)}")
    elif answer.content_type.startswith("text/event-stream"):
        end = answer.body[-4096:]
        if any(word in end for word in _FAILED):
            yield Fault("internal error", f"in a stream: {_words(end[-600:])}")
        elif not any(word in answer.body for word in (_ENDS + _RESPONSE_ENDS)):
            yield Fault("stream without an end", _words(end[-600:]))


def has_envelope(body: bytes, path: str) -> bool:
    """Whether clients of `path` can read this refusal."""
    try:
        reply = json.loads(body)
        error = reply["error"]
        is_whole = isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, KeyError, TypeError):
        return False
    is_anthropic = path.startswith("/v1/messages")
    return is_whole and (reply.get("type") == "error" if is_anthropic else {"param", "code"} <= error.keys())


def _words(body: bytes) -> str:
    return body[:600].decode(errors="replace")
