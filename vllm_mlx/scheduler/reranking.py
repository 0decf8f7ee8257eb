"""Plans a causal reranker's rows, one for each document of a request. It is pure: no mlx, no clock, no text."""

import math
from dataclasses import replace
from typing import Any

from ..core.events import FinishReason
from ..core.request import ROW_IDS, TokenSampling
from ..core.sequence import PromptInputs, Sequence
from ..core.step import SequenceUpdate
from .encoder import OpenTexts
from .scheduler import Scheduler


def _row(request: OpenTexts, number: int) -> Sequence:
    """Return the row of a document, counted from 1. It samples one token, and its document is not stored."""
    seq, texts = request.seq, request.tokenized
    shared, start, end = texts.ends[0], texts.ends[number - 1], texts.ends[number]
    prompt = PromptInputs(token_ids=(*texts.ids[:shared], *texts.ids[start:end]))
    sampling = TokenSampling(temperature=0.0, num_top_logprobs=2, read_ids=texts.answer_ids)
    row = replace(seq, seq_id=seq.seq_id + number, prompt=prompt, sampling=sampling, output_token_ids=[])
    return replace(row, max_tokens=1, max_stored=shared)


class RerankScheduler(Scheduler):
    """Runs a few documents of each request, and collects their scores until all are known."""

    def __init__(self, *settings: Any, **parts: Any):
        super().__init__(*settings, **parts)
        self._open: dict[int, OpenTexts] = {}  # by seq_id

    def add(self, seq: Sequence) -> None:
        """Let as many rows of a request wait as can run, so that the rows of others wait for no more."""
        request = self._open[seq.seq_id] = OpenTexts(seq)
        for number in range(1, min(len(request.tokenized.ends), 1 + self._max_num_seqs)):
            super().add(_row(request, number))

    def abort(self, seq_id: int) -> bool:
        """End a request with all of its rows, or one row. Returns False if there is none with this id."""
        if self._open.pop(seq_id, None) is None:
            return super().abort(seq_id)
        for row in [row for row in (*self._seqs, *self.waiting) if row.seq_id // ROW_IDS * ROW_IDS == seq_id]:
            super().abort(row.seq_id)
        return True

    def _news(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Take in the news of rows. A row that fails ends its request."""
        news: dict[int, SequenceUpdate] = {}
        for update in updates:
            if (seq_id := update.seq_id // ROW_IDS * ROW_IDS) not in self._open:
                continue  # another row has ended it
            request = self._open[seq_id]
            scores, ends = request.found, request.tokenized.ends
            for logprob in (token.logprob for token in update.tokens if token.logprob is not None):
                yes, no = map(dict(logprob.top).__getitem__, request.tokenized.answer_ids)
                scores[update.seq_id] = 1 / (1 + math.exp(min(no - yes, 700)))  # of more, exp is no number
                if (number := len(scores) + self._max_num_seqs) < len(ends):
                    super().add(_row(request, number))
            vectors = request.vectors(len(ends) - 1)
            reason, num_read = FinishReason.STOP if vectors else None, ends[len(scores)] if scores else 0
            update = replace(update, seq_id=seq_id, tokens=(), vectors=vectors, finish_reason=reason)
            news[seq_id] = replace(update, num_computed_tokens=num_read, num_encoded=len(scores))
            if vectors or update.error is not None:
                self.abort(seq_id)
        return list(news.values())
