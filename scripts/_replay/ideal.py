"""Computes how much of each prompt the server had seen before, as prompt or as reply, without asking the server.

Ids are those of the checkpoint's own tokenizer and template. Replies count with the numbers that the server reported:
the ids that it sampled need not be those of their text.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mlx.api.anthropic.decode import decode_messages_request
from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.openai.decode import decode_chat
from vllm_mlx.api.openai.schema import ChatCompletionBody
from vllm_mlx.api.responses.decode import decode_response
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats

from .player import Outcome
from .wire import CHAT, MESSAGES, Protocol

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
        return decode_chat(ChatCompletionBody.model_validate(body), reply_id="r", model="m", created=0).requests[0]
    if protocol is MESSAGES:
        return decode_messages_request(MessagesBody.model_validate(body), reply_id="r", model="m").request
    return decode_response(ResponsesBody.model_validate(body), reply_id="r", model="m", created_at=0).request
