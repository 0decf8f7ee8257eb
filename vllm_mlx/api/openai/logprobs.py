"""Log-probabilities in the two forms that OpenAI has: chat and completions."""

from collections.abc import Iterable, Sequence

from ...core.events import TokenLogprob
from ..encoder import TokenNames
from .replies import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot write


def chat_logprobs(tokens: Iterable[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs(content=[_content(token, names) for token in tokens])


def _content(token: TokenLogprob, names: TokenNames) -> ContentLogprob:
    return ContentLogprob(
        token=names.token_text(token.token_id),
        logprob=_finite(token.logprob),
        bytes=list(names.token_bytes(token.token_id)),
        top_logprobs=[
            TopLogprob(
                token=names.token_text(token_id), logprob=_finite(logprob), bytes=list(names.token_bytes(token_id))
            )
            for token_id, logprob in token.top
        ],
    )


class CompletionLogprobWriter:
    """`text_offset` counts characters from the start of the reply, over all tokens written so far."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        texts = [self._names.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[_finite(token.logprob) for token in tokens],
            top_logprobs=[
                {self._names.token_text(token_id): _finite(logprob) for token_id, logprob in token.top}
                for token in tokens
            ],
            text_offset=offsets,
        )


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR) if logprob == logprob else FLOOR
