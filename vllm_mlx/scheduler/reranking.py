"""Plans a causal reranker's rows, one for each document of a request. It is pure: no mlx, no clock, no text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.config import EngineConfig
from ..core.errors import VLLMMLXError
from ..core.events import FinishReason
from ..core.request import TokenSampling
from ..core.sequence import ROW_IDS, PromptInputs, Sequence, TokenizedTexts
from ..core.step import SequenceUpdate, StepOutput
from ..util.faults import Fault
from .scheduler import Scheduler

_MOST_LOG = 700.0  # the exponential of more is no number


@dataclass(slots=True)
class _Open:
    """The documents of one request that has not ended."""

    texts: TokenizedTexts
    rows: Iterator[Sequence]  # of documents that neither wait nor run yet
    scores: dict[int, float] = field(default_factory=dict)  # by the seq_id of the row


def _rows(seq: Sequence, texts: TokenizedTexts) -> Iterator[Sequence]:
    """Yield a row for each document, which samples one token. The prefix cache keeps the texts before the document."""
    (_, shared), *spans = texts.spans
    sampling = TokenSampling(temperature=0.0, num_top_logprobs=len(texts.answer_ids), read_ids=texts.answer_ids)
    for seq_id, (start, end) in enumerate(spans, seq.seq_id + 1):
        ids = (*texts.ids[:shared], *texts.ids[start:end])
        prompt = PromptInputs(token_ids=ids, snapshot_points=(shared,))
        row = replace(seq, seq_id=seq_id, prompt=prompt, sampling=sampling, max_tokens=1, max_stored=shared)
        yield replace(row, output_token_ids=[], prompt_logprobs=[])


class RerankScheduler(Scheduler):
    """Runs a few documents of each request, and collects their scores until all are known."""

    def __init__(self, config: EngineConfig, **parts: Any):
        super().__init__(config, **parts)
        self._open: dict[int, _Open] = {}  # by the seq_id of the request

    def add(self, seq: Sequence) -> None:
        """Let as many rows of the request wait as can run, so that other requests wait for no more."""
        assert seq.prompt.texts is not None, "other requests are refused"
        request = self._open[seq.seq_id] = _Open(seq.prompt.texts, _rows(seq, seq.prompt.texts))
        for _ in range(self._max_num_seqs):
            self._add_row(request)

    def _add_row(self, request: _Open) -> None:
        if (row := next(request.rows, None)) is not None:
            super().add(row)

    def abort(self, seq_id: int) -> bool:
        """End a request with all of its rows, or one row. Returns False if there is none with this id."""
        if self._open.pop(seq_id, None) is None:
            return super().abort(seq_id)
        for row in [*self._seqs, *self.waiting]:
            if row.seq_id // ROW_IDS * ROW_IDS == seq_id:
                super().abort(row.seq_id)
        return True

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        return self._of_requests(super().update(output))

    def recover(self, error: VLLMMLXError, fault: Fault | None = None, num_tokens: int = 0) -> list[SequenceUpdate]:
        return self._of_requests(super().recover(error, fault, num_tokens))

    def _of_requests(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Take in the news of rows, and return those of their requests. A row that fails ends its request."""
        news: dict[int, SequenceUpdate] = {}
        for update in updates:
            seq_id = update.seq_id // ROW_IDS * ROW_IDS
            if (request := self._open.get(seq_id)) is None:
                continue  # another row has failed
            scores, ends = request.scores, request.texts.ends
            for token in update.tokens:
                assert token.logprob is not None, "the row reads two"
                (_, yes), (_, no) = token.logprob.top
                scores[update.seq_id] = 1 / (1 + math.exp(min(no - yes, _MOST_LOG)))
                self._add_row(request)
            is_over = len(scores) == len(ends) - 1
            news[seq_id] = replace(
                update,
                seq_id=seq_id,
                tokens=(),
                vectors=[scores[row] for row in sorted(scores)] if is_over else (),
                num_computed_tokens=ends[len(scores)] if scores else 0,
                finish_reason=FinishReason.STOP if is_over else None,
            )
            if is_over or update.error is not None:
                self.abort(seq_id)
        return list(news.values())
