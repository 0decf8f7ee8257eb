"""What is counted of replies, from the updates alone."""

from vllm_mlx.core.receipt import CacheReceipt
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
    assert (totals.completion_tokens, totals.stalls.total, totals.ttft.quantiles(4.0)["p50"]) == (4, 1, 1.0)


MODELS = [("tiny", True)]  # its weights are in memory


def test_replies_are_counted_by_the_slowest_tier_of_their_cached_tokens() -> None:
    totals = Totals(started_s=0.0, stall_threshold_s=1.0)
    described = []
    for cached, disk in ((0, 0), (4, 0), (4, 0), (4, 3)):
        stats = ReplyStats(request_id="r", prompt_tokens=5, max_tokens=9, arrived_s=0.0, queued_s=0.0)
        receipt = CacheReceipt(cached_tokens=cached, disk_tokens=disk, stored_tokens=cached, hit="prefix")
        looked_up = SequenceUpdate(seq_id=0, receipt=receipt)
        totals.take(stats, looked_up, 1.0)
        totals.take(stats, update(7), 2.0)
        described.append(stats.describe(2.0, MODELS))
    assert totals.tiers == {"memory": 2, "disk": 1}
    assert (totals.cached_tokens, totals.disk_tokens) == (12, 3)
    assert [(each["tier"], each["disk_tokens"]) for each in described] == [
        (None, 0), ("memory", 0), ("memory", 0), ("disk", 3)
    ]  # fmt: skip


def test_a_queued_reply_says_that_it_waits_for_the_disk() -> None:
    stats = ReplyStats(request_id="r", seq_id=3, prompt_tokens=5, max_tokens=9, arrived_s=0.0, queued_s=0.0)
    assert [stats.describe(1.0, MODELS, reading)["waits_for"] for reading in ((), {3}, {4})] == [None, "disk", None]
    stats.take(update(7), 1.0)
    assert stats.describe(1.0, MODELS, {3})["waits_for"] is None


def test_texts_that_were_read_count_also_if_their_client_leaves() -> None:
    totals = Totals(started_s=0.0, stall_threshold_s=1.0)
    stats = ReplyStats(request_id="r", prompt_tokens=30, max_tokens=0, arrived_s=0.0, queued_s=0.0)
    for num_encoded in (0, 2, 0):
        totals.take(stats, SequenceUpdate(seq_id=0, num_encoded=num_encoded, num_computed_tokens=10 * num_encoded), 1.0)
    stats.end("aborted", 2.0)
    totals.end([stats])
    assert (totals.encoded_inputs, totals.encoded_tokens) == (2, 20)
