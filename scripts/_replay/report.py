"""A replay as a table for people and as JSON for programs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts import markdown

from .ideal import Ideal
from .player import Outcome

_COLUMNS = ("request", "at s", "prompt", "cached", "ideal", "of ideal", "reply", "TTFT")
_ERROR_CHARS = 60
_FILE_WIDTH = 160


class Sums:
    """The sums over several requests, as the report's JSON names them."""

    def __init__(self, outcomes: Iterable[Outcome], ideals: Mapping[int, Ideal]):
        replied = [each for each in outcomes if each.reply is not None and not each.error]
        replies = [each.reply for each in replied if each.reply]
        self.num_requests = len(replied)
        self.prompt_tokens = sum(reply.prompt_tokens for reply in replies)
        self.cached_tokens = sum(reply.cached_tokens for reply in replies)
        self.ideal_tokens = sum(ideals[each.recorded.number].tokens for each in replied) if ideals else None
        self.cached_of_ideal = self.cached_tokens / self.ideal_tokens if self.ideal_tokens else None
        new = 0 if self.ideal_tokens is None else self.prompt_tokens - self.ideal_tokens
        self.computed_of_ideal = (self.prompt_tokens - self.cached_tokens) / new if new else None
        self.completion_tokens = sum(reply.completion_tokens for reply in replies)
        waits = sorted(each.ttft_s for each in replied if each.ttft_s is not None)
        self.median_ttft_s = waits[len(waits) // 2] if waits else None


def groups(outcomes: Sequence[Outcome], ideals: Mapping[int, Ideal]) -> dict[str, Sums]:
    """Sum up each session, all, and, if the ideal is known, those whose longest beginning came from one place."""
    names = dict.fromkeys(each.recorded.session for each in outcomes)
    found = {name: [each for each in outcomes if each.recorded.session == name] for name in names}
    if ideals:
        for title, is_in_session in (("within a session", True), ("across sessions", False)):
            found[title] = [
                each
                for each in outcomes
                if (ideal := ideals.get(each.recorded.number)) and ideal.is_in_session is is_in_session
            ]
    found["all"] = list(outcomes)
    return {name: sums for name, some in found.items() if (sums := Sums(some, ideals)).num_requests}


def print_table(outcomes: Sequence[Outcome], ideals: Mapping[int, Ideal], *, brief: bool) -> None:
    """Print the table in Markdown, as the docs show it. `brief`: sums only."""
    rows = [_row(outcome, ideals.get(outcome.recorded.number)) for outcome in outcomes if not brief]
    for name, sums in groups(outcomes, ideals).items():
        numbers = (_number(sums.prompt_tokens), _number(sums.cached_tokens), _number(sums.ideal_tokens))
        last = (_percent(sums.cached_of_ideal), _number(sums.completion_tokens), _ms(sums.median_ttft_s))
        rows.append((f"{name}: {sums.num_requests} requests", "", *numbers, *last))
    markdown.output(_FILE_WIDTH).print(markdown.table(_COLUMNS, rows, left=("request",)))


def _row(outcome: Outcome, ideal: Ideal | None) -> tuple[str, ...]:
    recorded, reply = outcome.recorded, outcome.reply
    name, at = f"{recorded.session} {recorded.endpoint.partition('?')[0]}", f"{recorded.at_s:.2f}"
    if reply is None or outcome.error:
        return f"{name} → {outcome.status} {outcome.error[:_ERROR_CHARS]}", at, *[""] * (len(_COLUMNS) - 2)
    share = None if ideal is None or not ideal.tokens else reply.cached_tokens / ideal.tokens
    return (
        name,
        at,
        _number(reply.prompt_tokens),
        _number(reply.cached_tokens),
        _number(None if ideal is None else ideal.tokens),
        _percent(share),
        _number(reply.completion_tokens),
        _ms(outcome.ttft_s),
    )


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f} ms"


def to_json(outcomes: Sequence[Outcome], ideals: Mapping[int, Ideal], **facts: Any) -> dict[str, Any]:
    return {
        **facts,
        "requests": [_request_json(each, ideals.get(each.recorded.number)) for each in outcomes],
        "sums": {name: vars(sums) for name, sums in groups(outcomes, ideals).items()},
    }


def _request_json(outcome: Outcome, ideal: Ideal | None) -> dict[str, Any]:
    recorded, reply = outcome.recorded, outcome.reply
    result: dict[str, Any] = {
        "number": recorded.number,
        "session": recorded.session,
        "t": recorded.at_s,
        "endpoint": recorded.endpoint,
        "status": outcome.status,
        "seconds": outcome.ended_s - outcome.sent_s,
    }
    if outcome.error:
        return {**result, "error": outcome.error}
    if reply is not None:
        result |= {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
        result |= {"completion_tokens": reply.completion_tokens, "ttft_s": outcome.ttft_s}
    if ideal is not None:
        result |= {"ideal_tokens": ideal.tokens, "ideal_in_session": ideal.is_in_session}
        result |= {"tokens_unlike_plain": ideal.num_unlike}
    return result
