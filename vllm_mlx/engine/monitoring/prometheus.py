"""Writes the figures for Prometheus: under vLLM's names if the meaning is the same, otherwise under our own.

Nothing is counted here. Families are built on request, from the counts of the event loop and of the engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ...cache.stats import DiskReport, TreeStats
from ...core.receipt import Shortfall, Tier
from ...ranks.figures import RankRow
from ...scheduler.residence import State
from .counters import Histogram, Outcome, Totals
from .schema import DraftStatus, ImageStatus, LaneReport
from .status import Moment, memory_status, outcomes

_FINISHED: dict[str, tuple[Outcome, ...]] = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("aborted", "cancelled"),
    "error": ("failed",),
}


def metric_families(moment: Moment) -> Iterator[Metric]:
    vllm = _Builder("vllm:", {"model_name": moment.names[0], "engine": "0"})
    own = _Builder("vllm_mlx_", {"model_name": moment.names[0]})
    models = [(vllm.of(name), own.of(name), lane, totals) for name, lane, totals in moment.models]
    yield from _joined(_vllm_counts(vllm, moment, lane, totals) for vllm, _, lane, totals in models)
    yield from _joined(_vllm_latencies(vllm, totals) for vllm, _, _, totals in models)
    yield from _own_process(own, moment)
    yield from _joined(_own_counts(own, totals, moment.now) for _, own, _, totals in models)
    yield from _own_memory(own, moment)
    yield from _own_caches(own, moment.report.cache)
    yield from _joined(_own_images(own, lane.images) for _, own, lane, _ in models if lane.images["enabled"])
    yield from _joined(_own_model(own, lane) for _, own, lane, _ in models)
    yield from _joined(_drafts(vllm, own, lane.drafts) for vllm, own, lane, _ in models if lane.drafts["enabled"])
    if moment.report.ranks:
        yield from _own_ranks(own, moment.report.ranks)
    if moment.report.disk is not None:
        yield from _own_disk(own, moment.report.disk)


def _joined(models: Iterable[Iterator[Metric]]) -> Iterator[Metric]:
    """Join the same metrics of several models, whose samples differ by their first label."""
    for first, *others in zip(*models, strict=True):
        first.samples += [sample for other in others for sample in other.samples]
        yield first


class _Builder:
    """Builds metric families whose names share a prefix. Every sample has the same first labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]):
        self.prefix = prefix
        self.labels = labels

    def of(self, model: str) -> "_Builder":
        """Return a builder for the figures of one model."""
        return _Builder(self.prefix, {**self.labels, "model_name": model})

    def gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        """Build a gauge with one sample; with `label`, one sample for each of the values."""
        return self._filled(GaugeMetricFamily(self.prefix + name, text, labels=self._names(label)), value)

    def counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        """Build a counter in the same way."""
        return self._filled(CounterMetricFamily(self.prefix + name, text, labels=self._names(label)), value)

    def histogram(self, name: str, text: str, counted: Histogram) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, text, labels=self._names(""))
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in counted.buckets()
        ]
        family.add_metric(list(self.labels.values()), buckets, counted.sum)
        return family

    def _names(self, label: str) -> list[str]:
        return [*self.labels, label] if label else list(self.labels)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        values = {(key,): number for key, number in value.items()} if isinstance(value, Mapping) else {(): value}
        for labels, number in values.items():
            family.add_metric([*self.labels.values(), *labels], number)
        return family


def _vllm_counts(vllm: _Builder, moment: Moment, lane: LaneReport, totals: Totals) -> Iterator[Metric]:
    """Yield the metrics that vLLM has too, under its names."""
    yield vllm.gauge("num_requests_running", "Running replies.", lane.row["running"])
    yield vllm.gauge("num_requests_waiting", "Waiting replies.", lane.row["waiting"])
    rows_bytes = moment.rows_bytes
    used = lane.live_bytes / rows_bytes if rows_bytes else 0.0
    text = "Share of the memory for rows and caches that running replies use, 0 to 1."
    yield vllm.gauge("kv_cache_usage_perc", text, used)
    text = "Replies that were preempted: they gave their memory back and continue later."
    yield vllm.counter("num_preemptions", text, lane.num_preemptions)
    yield vllm.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens)
    yield vllm.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens)
    yield vllm.counter("prompt_tokens", "Prompt tokens, including cached ones.", totals.prompt_tokens)
    yield vllm.counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", totals.cached_tokens)
    yield vllm.counter("generation_tokens", "Sampled tokens.", totals.completion_tokens)
    ended = {reason: sum(totals.outcomes[outcome] for outcome in outcomes) for reason, outcomes in _FINISHED.items()}
    yield vllm.counter("request_success", "Ended replies by finish reason.", ended, "finished_reason")


def _vllm_latencies(vllm: _Builder, totals: Totals) -> Iterator[Metric]:
    text = "Seconds from the arrival of a request to its first token."
    yield vllm.histogram("time_to_first_token_seconds", text, totals.ttft)
    yield vllm.histogram("inter_token_latency_seconds", "Seconds between two tokens of one reply.", totals.gap)
    text = "Seconds from the arrival of a request to its last token."
    yield vllm.histogram("e2e_request_latency_seconds", text, totals.e2e)
    yield vllm.histogram("request_queue_time_seconds", "Seconds that a sequence waits for a place.", totals.queue)
    yield vllm.histogram("request_prefill_time_seconds", "Seconds from admission to the first token.", totals.prefill)
    yield vllm.histogram("request_decode_time_seconds", "Seconds from the first token to the last.", totals.decode)
    yield vllm.histogram("request_prompt_tokens", "Prompt tokens of finished replies.", totals.prompt_sizes)
    yield vllm.histogram("request_generation_tokens", "Sampled tokens of finished replies.", totals.reply_sizes)


def _own_process(own: _Builder, moment: Moment) -> Iterator[Metric]:
    build = {**own.labels, **{name: str(value) for name, value in moment.build.items()}}
    yield InfoMetricFamily(own.prefix + "build", "Versions of the server and its libraries.", value=build)
    yield own.counter("steps", "Steps of the engine.", moment.report.num_steps)


def _own_counts(own: _Builder, totals: Totals, now: float) -> Iterator[Metric]:
    """Yield the counts that only this server has."""
    yield own.counter("requests", "Ended requests, with any outcome.", totals.requests)
    yield own.counter("replies", "Ended replies by outcome.", outcomes(totals), "outcome")
    tiers = {"memory": totals.cached_tokens - totals.disk_tokens, "disk": totals.disk_tokens}
    yield own.counter("cached_tokens", "Prompt tokens taken from the prefix cache, by tier.", tiers, "tier")
    hits = {tier: totals.tiers[tier] for tier in get_args(Tier)}
    text = "Replies with cached tokens, by the slowest tier that these came from."
    yield own.counter("cache_hits", text, hits, "tier")
    yield own.counter("prefill_tokens", "Prompt tokens that were computed.", totals.computed_tokens)
    text = "Replies with fewer cached tokens than the previous turn made likely, by reason."
    yield own.counter("cache_shortfalls", text, {kind.value: totals.shortfalls[kind] for kind in Shortfall}, "reason")
    yield own.counter("stalls", "Gaps between two tokens that exceed the stall limit.", totals.stalls.total)
    text = "The longest gap between two tokens that exceeded the stall limit."
    yield own.gauge("longest_stall_seconds", text, totals.stalls.longest_s)
    text = "Sampled tokens per second over the last ten seconds."
    yield own.gauge("generation_tokens_per_second", text, totals.completion_rate.per_second(now))
    text = "Computed prompt tokens per second over the last ten seconds."
    yield own.gauge("prefill_tokens_per_second", text, totals.prompt_rate.per_second(now))


def _own_memory(own: _Builder, moment: Moment) -> Iterator[Metric]:
    parts = cast(dict[str, int], memory_status(moment))
    yield own.gauge("memory_budget_bytes", "Memory that the server may use.", parts.pop("total_bytes"))
    by_use = {name.removesuffix("_bytes"): num_bytes for name, num_bytes in parts.items()}
    yield own.gauge("memory_bytes", "The memory budget by use.", by_use, "part")
    device = moment.report.device
    used = {"active": device.active_bytes, "peak": device.peak_bytes, "freed": device.cache_bytes}
    yield own.gauge("device_memory_bytes", "Memory as MLX counts it.", used, "kind")
    if device.system.footprint_bytes is not None:
        yield own.gauge("process_memory_bytes", "Memory as macOS counts it.", device.system.footprint_bytes)


def _own_caches(own: _Builder, stats: TreeStats | None) -> Iterator[Metric]:
    if stats is not None:
        kinds = {str(kind): count for kind, count in stats.hits.items()} | {"miss": stats.misses}
        yield own.counter("cache_lookups", "Look-ups in the prefix cache by kind of hit.", kinds, "kind")
        yield own.counter("cache_evictions", "Evictions from the prefix cache.", stats.evictions)
        text = "Bytes freed by evictions from the prefix cache."
        yield own.counter("cache_evicted_bytes", text, stats.evicted_bytes)
        yield own.gauge("cache_paths", "Stored paths in the prefix cache.", stats.entry_count)
        yield own.gauge("cache_states", "Snapshots of recurrent state in the prefix cache.", stats.num_states)
        yield own.gauge("cache_buffers", "Device buffers that the prefix cache holds.", stats.used_buffers)


def _own_images(own: _Builder, images: ImageStatus) -> Iterator[Metric]:
    yield own.counter("images_encoded", "Runs of the vision encoder.", images["encoded"])
    yield own.counter("image_evictions", "Evictions from the cache of image features.", images["evictions"])


def _own_model(own: _Builder, lane: LaneReport) -> Iterator[Metric]:
    states = {state: int(state == lane.row["state"]) for state in get_args(State)}
    yield own.gauge("model_state", "Where the weights are: 1 for the present state.", states, "state")
    yield own.counter("model_loads", "Loads of the weights, by what asked for them.", lane.row["loads"], "reason")
    yield own.gauge("model_load_seconds", "Seconds that the last load after the start took.", lane.row["load_s"])
    text = "Seconds of that load in which the model was built, and nothing else ran."
    yield own.gauge("model_build_seconds", text, lane.build_s)
    text = "Bytes of the weights that were still in memory after the last unload."
    yield own.gauge("model_bytes_missing", text, lane.row["missing_bytes"])


def _drafts(vllm: _Builder, own: _Builder, drafts: DraftStatus) -> Iterator[Metric]:
    """Yield what drafts were worth: sums under vLLM's names, and the same by source."""
    drafted, accepted = drafts["drafted_tokens"], drafts["accepted_tokens"]
    yield vllm.counter("spec_decode_num_drafts", "Drafts verified, one for each reply and pass.", drafts["num_drafts"])
    yield vllm.counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", sum(drafted.values()))
    text = "Drafted tokens that were accepted."
    yield vllm.counter("spec_decode_num_accepted_tokens", text, sum(accepted.values()))
    text = "Drafted tokens that were accepted, by position in the draft."
    places = {str(place): number for place, number in enumerate(drafts["accepted_by_position"])}
    yield vllm.counter("spec_decode_num_accepted_tokens_per_pos", text, places, "position")
    yield own.counter("draft_tokens", "Tokens that were drafted, by source.", drafted, "source")
    yield own.counter("accepted_draft_tokens", "Drafted tokens that were accepted, by source.", accepted, "source")


def _own_ranks(own: _Builder, rows: Iterable[RankRow]) -> Iterator[Metric]:
    """Yield the figures of each of several Macs that run the model."""
    ranks = {str(row["rank"]): cast(dict[str, float], row) for row in rows}
    for name, key, text in (
        ("rank_plan", "plan", "The last plan of a step that a rank has carried out."),
        ("rank_lag_plans", "lag_plans", "Plans that have reached a rank and are not carried out."),
        ("rank_lag_seconds", "lag_s", "Seconds for which a rank has worked on the first of these plans."),
        ("rank_memory_bytes", "active_bytes", "Memory of a rank as MLX counts it."),
        ("rank_sum_seconds", "sum_s", "Seconds that a sum over all ranks took at the start of a rank."),
    ):
        yield own.gauge(name, text, {rank: row[key] for rank, row in ranks.items()}, "rank")


def _own_disk(own: _Builder, disk: DiskReport) -> Iterator[Metric]:
    text = "Whether the prefix cache is kept on disk (1), or an error has turned that off (0)."
    yield own.gauge("disk_works", text, int(disk.off_reason is None))
    yield own.gauge("disk_bytes", "Size of the prefix cache on disk.", disk.used_bytes)
    yield own.gauge("disk_limit_bytes", "Limit of the prefix cache on disk.", disk.max_bytes)
    yield own.gauge("disk_records", "Files of the prefix cache on disk.", disk.num_records)
    yield own.gauge("disk_waiting_bytes", "State that is to be written to disk.", disk.num_waiting_bytes)
    yield own.gauge("disk_written_today_bytes", "Bytes written to disk today.", disk.written_today_bytes)
    yield own.gauge("disk_daily_limit_bytes", "Bytes that may be written to disk in a day.", disk.daily_bytes)
    yield own.counter("disk_hits", "Requests for which cached state was read from disk.", disk.hits)
    yield own.counter("disk_tokens_read", "Tokens whose state was read from disk.", disk.tokens_read)
    yield own.counter("disk_bytes_read", "Bytes of state that were read from disk.", disk.bytes_read)
    text = "Reads from disk that were not made, because computing was faster."
    yield own.counter("disk_reads_not_made", text, disk.reads_not_made)
    text = "Reads from disk after which the prompt resumed before the end of what was read."
    yield own.counter("disk_reads_not_used", text, disk.reads_not_used)
    yield own.counter(
        "disk_damaged_files", "Files that were removed from disk, because they were damaged.", disk.num_damaged
    )
