"""Computes how much of each prompt the server had seen before, without asking the server, and reports a replay.

Ids are those of the checkpoint's own tokenizer and template. Replies count with the numbers that the server reported:
the ids that it sampled need not be those of their text."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import markdown
from vllm_mlx.api.anthropic.decode import MessageSpec, decode_messages_request
from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.openai.decode import ReplySpec, decode_chat
from vllm_mlx.api.openai.schema import ChatCompletionBody
from vllm_mlx.api.responses.decode import decode_response
from vllm_mlx.api.responses.replies import ResponseSpec
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats

from .player import Outcome
from .trace import CHAT, MESSAGES, Protocol

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Ideal:
    tokens: int  # of the prompt, at most all but one
    is_in_session: bool  # whether the longest beginning was seen in the same session
    num_unlike: int  # tokens that the server counted and a plain rendering does not have, or the other way round


@dataclass(frozen=True, slots=True)
class _Prompt:
    outcome: Outcome
    request: Request
    text: str
    ends: list[int]  # of the tokens of a plain rendering, in characters
    parent: "_Prompt | None"  # the latest whose reply it contains

    @property
    def num_tokens(self) -> int:
        assert self.outcome.reply is not None
        return self.outcome.reply.prompt_tokens

    def tokens_before(self, num_chars: int) -> int:
        """Return tokens of the server's prompt in its first characters; behind a reply, counted from the end."""
        plain = bisect_right(self.ends, num_chars)
        if self.parent is None:
            return plain
        if num_chars <= len(self.parent.text):
            return self.parent.tokens_before(num_chars)
        return max(self.parent.num_tokens, self.num_tokens - (len(self.ends) - plain))


def processor_of(checkpoint: Path, chat_template: str | None = None) -> RequestProcessor:
    """Render and tokenise prompts as a server of the checkpoint does, of any length."""
    tokenizer = Tokenizer.load(checkpoint, chat_template=chat_template)
    config = EngineConfig(model=str(checkpoint), chat_template=chat_template)
    return RequestProcessor(
        tokenizer,
        config,
        checkpoint,
        formats=reply_formats(config, tokenizer),
        max_model_len=_NO_LIMIT,
        vocab_size=tokenizer.vocab_size,
        resumes_anywhere=False,
    )


class Ideals:
    def __init__(self, checkpoint: Path, *, chat_template: str | None = None):
        self._processor = processor_of(checkpoint, chat_template)
        self._tokenizer = self._processor.tokenizer

    def of(self, outcomes: Iterable[Outcome]) -> dict[int, Ideal]:
        """Return the ideal of each request that got a reply, by the request's number."""
        result: dict[int, Ideal] = {}
        seen: dict[int, _Prompt] = {}
        for outcome in sorted(outcomes, key=lambda each: each.sent_s):
            if outcome.reply is None or outcome.error:
                continue
            prompt = self._prompt(outcome, seen)
            found = [(self._common(prompt, earlier), earlier) for earlier in seen.values()]
            tokens, best = max(found, key=lambda each: each[0], default=(0, None))
            session = best.outcome.recorded.session if best is not None else None
            unlike = 0 if prompt.parent is not None else prompt.num_tokens - len(prompt.ends)
            is_in_session = session == outcome.recorded.session
            result[outcome.recorded.number] = Ideal(min(tokens, prompt.num_tokens - 1), is_in_session, unlike)
            seen[outcome.recorded.number] = prompt
        return result

    def _prompt(self, outcome: Outcome, seen: dict[int, _Prompt]) -> _Prompt:
        protocol = outcome.recorded.protocol
        assert protocol is not None
        request = decode(protocol, outcome.bodies.given)
        chat = self._processor.prepare(request).chat
        assert chat is not None
        ends = [end for _, end in self._tokenizer.encoding(chat.text).offsets]
        parents = [seen[number] for number in outcome.bodies.parents if number in seen]
        parent = max(
            (each for each in parents if chat.text.startswith(each.text)), key=lambda each: len(each.text), default=None
        )
        return _Prompt(outcome, request, chat.text, ends, parent)

    def _common(self, prompt: _Prompt, earlier: _Prompt) -> int:
        num_chars = common_prefix(prompt.text, earlier.text)
        reply = earlier.outcome.reply
        assert reply is not None
        if num_chars == len(earlier.text):
            if self._goes_on(prompt, earlier):
                return earlier.num_tokens + reply.completion_tokens
            return earlier.num_tokens
        return min(earlier.tokens_before(num_chars), prompt.tokens_before(num_chars))

    def _goes_on(self, prompt: _Prompt, earlier: _Prompt) -> bool:
        """Return whether the prompt holds the earlier one's reply, and its template shows all of it, reasoning too."""
        if earlier.outcome.recorded.number not in prompt.outcome.bodies.parents:
            return False
        if earlier.outcome.ended_s > prompt.outcome.sent_s:
            return False
        assert prompt.request.messages is not None and earlier.request.messages is not None
        reply = prompt.request.messages[len(earlier.request.messages)]
        rest = prompt.text[len(earlier.text) :]
        return all(text.strip() in rest for text in _texts(reply))


def _texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, TextPart | ReasoningPart)]


def decode(protocol: Protocol, body: dict[str, Any]) -> Request:
    if protocol is CHAT:
        chat = ReplySpec(reply_id="r", model="m", created=0)
        return decode_chat(ChatCompletionBody.model_validate(body), chat).request
    if protocol is MESSAGES:
        message = MessageSpec(reply_id="r", model="m")
        return decode_messages_request(MessagesBody.model_validate(body), message).request
    response = ResponseSpec(reply_id="r", model="m", created_at=0)
    return decode_response(ResponsesBody.model_validate(body), response).request


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
