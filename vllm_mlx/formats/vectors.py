"""The output of an encoder: vectors or scores, and no text."""

import math
from collections.abc import Sequence
from typing import Any

from ..core.events import ContentEvent, Finished, FinishReason, GenerationEvent, TokenLogprob, Usage, Vectors
from ..core.messages import Message
from ..core.step import TokenOutput
from .reply import FinishedReply

_LEAST_LENGTH = 1e-9  # of a vector that is scaled, as in mlx-vlm's pooling


class VectorOutput:
    """Holds the vectors of one request until it ends. An encoder samples no tokens."""

    counts = stopped = is_silent = False
    reply = FinishedReply(message=Message("assistant", ()), token_ids=())  # nothing of it can be a part of a prompt

    def __init__(self, num_prompt_tokens: int, *, dimensions: int | None = None, normalize: bool = False):
        """Cut each vector to `dimensions`, unless this is None; then scale it to length 1 again, with `normalize`."""
        self._num_prompt_tokens = num_prompt_tokens
        self._dimensions, self._normalize = dimensions, normalize
        self.vectors: Sequence[Any] = ()

    def feed(self, tokens: Sequence[TokenOutput]) -> list[ContentEvent]:
        return []

    def feed_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take nothing: log-probabilities are those of sampled tokens."""

    def usage(self, cached_tokens: int) -> Usage:
        return Usage(prompt_tokens=self._num_prompt_tokens, cached_tokens=cached_tokens)

    def finish(
        self, reason: FinishReason, stop_token_id: int | None = None, *, cached_tokens: int = 0
    ) -> list[GenerationEvent]:
        vectors = self.vectors if self._dimensions is None else [self._cut(vector) for vector in self.vectors]
        return [Vectors(vectors), Finished(reason, self.usage(cached_tokens))]

    def _cut(self, vector: Any) -> Any:
        part = vector[: self._dimensions]
        return part / max(math.sqrt(float((part * part).sum())), _LEAST_LENGTH) if self._normalize else part
