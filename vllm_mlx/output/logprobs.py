"""Which sampled tokens a text event carries. Knows no text, only lengths."""

from collections import deque
from collections.abc import Sequence

from ..core.events import ContentEvent, TextDelta, TokenLogprob


class LogprobQueue:
    """Tokens wait here until the parser shows their text. Each is given to the first event that shows some of it."""

    def __init__(self) -> None:
        self._tokens: deque[TokenLogprob | None] = deque()  # whose piece has not come
        self._spans: deque[tuple[int, int, TokenLogprob]] = deque()  # (start, end, token) in characters parsed
        self._num_chars = 0

    def add_token(self, logprob: TokenLogprob | None) -> None:
        self._tokens.append(logprob)

    def add_piece(self, num_tokens: int, num_chars: int) -> None:
        """The next tokens make up the next characters that the parser is fed."""
        start, self._num_chars = self._num_chars, self._num_chars + num_chars
        for _ in range(num_tokens):
            logprob = self._tokens.popleft()
            if logprob is not None and num_chars:
                self._spans.append((start, self._num_chars, logprob))

    def attach(self, events: list[ContentEvent], text_starts: Sequence[int]) -> list[ContentEvent]:
        """`text_starts`: of each text event, in characters parsed. What lies before it was no content."""
        starts = iter(text_starts)
        return [self._with_logprobs(event, next(starts)) if isinstance(event, TextDelta) else event for event in events]

    def _with_logprobs(self, event: TextDelta, start: int) -> TextDelta:
        end = start + len(event.text)
        logprobs: list[TokenLogprob] = []
        while self._spans and self._spans[0][0] < end:
            _, token_end, logprob = self._spans.popleft()
            if token_end > start:
                logprobs.append(logprob)
        return TextDelta(event.text, tuple(logprobs))
