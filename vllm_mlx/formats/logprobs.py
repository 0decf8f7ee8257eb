"""Log-probabilities with the text of their tokens: those of a reply, and of the prompt that it echoes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.events import ContentEvent, TextDelta, TokenLogprob
from ..core.request import Request
from ..core.sequence import PromptInputs
from .tokenizer import Tokenizer

_MOST_BYTES = 8  # of tokens that are read together: a character has at most 4


class LogprobQueue:
    """Holds tokens until the parser emits their text. The first event with a part of that text carries the token."""

    def __init__(self, num_echoed: int | None = None) -> None:
        """`num_echoed`: the characters of the prompt in the reply, which then also shows tokens without text."""
        self._num_echoed = num_echoed
        self._tokens: deque[TokenLogprob | None] = deque()  # tokens whose piece is still to come
        self._spans: deque[tuple[int, int, TokenLogprob]] = deque()  # (start, end, token) in parsed characters
        self._num_chars = 0

    def add_token(self, logprob: TokenLogprob | None) -> None:
        self._tokens.append(logprob)

    def add_piece(self, num_tokens: int, num_chars: int) -> None:
        """Note that the parser is fed `num_chars` characters, which are the text of the next `num_tokens` tokens."""
        start, self._num_chars = self._num_chars, self._num_chars + num_chars
        for _ in range(num_tokens):
            logprob = self._tokens.popleft()
            if logprob is not None and self._num_echoed is not None:
                self._spans.append((start, self._num_chars, replace(logprob, offset=self._num_echoed + start)))
            elif logprob is not None and num_chars:
                self._spans.append((start, self._num_chars, logprob))

    def rest(self) -> list[ContentEvent]:
        """Return the tokens that no text follows, if the reply shows tokens without text."""
        if self._num_echoed is None or not self._spans:
            return []
        return [TextDelta("", tuple(logprob for _, _, logprob in self._spans))]

    def attach(self, events: list[ContentEvent], text_spans: Sequence[tuple[int, int]]) -> list[ContentEvent]:
        """Add tokens to text events. `text_spans`: (start, end) of each of these in parsed characters.

        Tokens before a span were not content.
        """
        spans = iter(text_spans)
        return [self._with_logprobs(event, *next(spans)) if isinstance(event, TextDelta) else event for event in events]

    def _with_logprobs(self, event: TextDelta, start: int, end: int) -> TextDelta:
        logprobs: list[TokenLogprob] = []
        while self._spans and self._spans[0][0] < end:
            _, token_end, logprob = self._spans.popleft()
            if token_end > start or self._num_echoed is not None:
                logprobs.append(logprob)
        return TextDelta(event.text, tuple(logprobs))


def echoed_text(tokenizer: Tokenizer, request: Request, prompt: PromptInputs) -> str | None:
    """Return the text of a completion's prompt, which the request may want at the start of the reply."""
    if not request.echo or request.messages is not None:
        return None
    if isinstance(request.prompt, str):
        return request.prompt
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=request.sampling.skip_special_tokens)


def echo_logprobs(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the prompt, each with its place in `text`. `logprobs` lack the first token."""
    scored = (TokenLogprob(token_ids[0], None), *logprobs)
    places = _offsets(tokenizer, text, token_ids)
    return tuple([TokenLogprob(t.token_id, t.logprob, t.top, at) for t, at in zip(scored, places, strict=False)])


def _offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the place in `text` where each token begins. A token that the text does not show has no length."""
    at, spelled = 0, b""
    for token_id in token_ids:
        yield at
        spelled = spelled[-_MOST_BYTES:] + tokenizer.token_bytes(token_id)
        piece = spelled.decode(errors="replace")
        shown = piece if text.startswith(piece, at) else piece.lstrip(" ")  # some put a space in front
        shown = shown if text.startswith(shown, at) else ""
        at += len(shown)
        if shown or not piece.endswith("\ufffd"):
            spelled = b""
