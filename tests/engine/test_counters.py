"""What is counted of replies, from the updates alone."""

from vllm_mlx.core.step import SequenceUpdate, TokenOutput
from vllm_mlx.engine.monitoring.counters import ReplyStats, Totals


def update(*token_ids: int) -> SequenceUpdate:
    tokens = tuple(TokenOutput(seq_id=0, token_id=token_id) for token_id in token_ids)
    return SequenceUpdate(seq_id=0, tokens=tokens, num_computed_tokens=5)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    totals = Totals(started_s=0.0, stall_threshold_s=1.0)
    stats = ReplyStats(request_id="r", prompt_tokens=5, max_tokens=9, arrived_s=0.0, queued_s=0.0)
    for now, new in ((1.0, update(7)), (1.5, update(8, 9)), (4.0, update(3))):
        totals.take(stats, new, now)
    assert totals.gap.quantiles(4.0) == {"count": 3, "p50": 0.5, "p99": 2.5, "max": 2.5}
    assert (totals.completion_tokens, totals.stalls.num, totals.ttft.quantiles(4.0)["p50"]) == (4, 1, 1.0)
