"""The figures in Prometheus' form: vLLM's metric names where the meaning is the same, and names of our own.

Nothing is counted here. Families are built on request, from the counts of the event loop and of the engine.
"""

from collections.abc import Iterable, Iterator
from typing import cast, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ...core.receipt import Shortfall
from .counters import Histogram, Outcome, Totals
from .schema import EngineReport
from .status import Moment, memory_status

_FINISHED: dict[str, tuple[Outcome, ...]] = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("aborted", "cancelled"),
    "error": ("failed",),
}


def metric_families(moment: Moment) -> Iterator[Metric]:
    yield from _VLLMFamilies(moment.facts["model"]).families(moment)
    yield from _OwnFamilies(moment.facts["model"]).families(moment)


class _Families:
    """Builds metric families whose names share a prefix. Every sample names the model."""

    prefix = ""

    def __init__(self, model: str):
        self._labels: dict[str, str] = {"model_name": model}

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self.prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def by_label(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = CounterMetricFamily(self.prefix + name, text, labels=[*self._labels, label])
        for key, value in values:
            family.add_metric([*self._labels.values(), key], value)
        return family

    def parts(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, text, labels=[*self._labels, label])
        for key, value in values:
            family.add_metric([*self._labels.values(), key], value)
        return family

    def histogram(self, name: str, text: str, counted: Histogram) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, text, labels=list(self._labels))
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in counted.buckets()
        ]
        family.add_metric(list(self._labels.values()), buckets, counted.sum)
        return family


class _VLLMFamilies(_Families):
    """The metrics that vLLM has too, under its names."""

    prefix = "vllm:"

    def __init__(self, model: str):
        super().__init__(model)
        self._labels["engine"] = "0"

    def families(self, moment: Moment) -> Iterator[Metric]:
        yield from self._state(moment)
        yield from self._counts(moment)
        yield from self._latencies(moment.totals)

    def _state(self, moment: Moment) -> Iterator[Metric]:
        report, rows_bytes = moment.report, moment.memory.rows_bytes
        yield self.gauge("num_requests_running", "Running replies.", report.num_running)
        yield self.gauge("num_requests_waiting", "Waiting replies.", report.num_waiting)
        used = report.live_bytes / rows_bytes if rows_bytes else 0.0
        yield self.gauge(
            "kv_cache_usage_perc", "Share of the memory for rows and caches that running replies use, 0 to 1.", used
        )

    def _counts(self, moment: Moment) -> Iterator[Metric]:
        totals = moment.totals
        yield self.counter(
            "num_preemptions",
            "Replies that were preempted: they gave their memory back and continue later.",
            moment.report.num_preemptions,
        )
        yield self.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens)
        yield self.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens)
        yield self.counter("prompt_tokens", "Prompt tokens, including cached ones.", totals.prompt_tokens)
        yield self.counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", totals.cached_tokens)
        yield self.counter("generation_tokens", "Sampled tokens.", totals.completion_tokens)
        ended = [
            (reason, sum(totals.outcomes[outcome] for outcome in outcomes)) for reason, outcomes in _FINISHED.items()
        ]
        yield self.by_label("request_success", "Ended replies by finish reason.", "finished_reason", ended)

    def _latencies(self, totals: Totals) -> Iterator[Metric]:
        for name, text, counted in (
            (
                "time_to_first_token_seconds",
                "Seconds from the arrival of a request to its first token.",
                totals.ttft.histogram,
            ),
            ("inter_token_latency_seconds", "Seconds between two tokens of one reply.", totals.gap.histogram),
            (
                "e2e_request_latency_seconds",
                "Seconds from the arrival of a request to its last token.",
                totals.e2e.histogram,
            ),
            ("request_queue_time_seconds", "Seconds that a sequence waits for a place.", totals.queue.histogram),
            ("request_prefill_time_seconds", "Seconds from admission to the first token.", totals.prefill.histogram),
            ("request_decode_time_seconds", "Seconds from the first token to the last.", totals.decode.histogram),
            ("request_prompt_tokens", "Prompt tokens of finished replies.", totals.prompt_sizes),
            ("request_generation_tokens", "Sampled tokens of finished replies.", totals.reply_sizes),
        ):
            yield self.histogram(name, text, counted)


class _OwnFamilies(_Families):
    """The metrics that only this server has."""

    prefix = "vllm_mlx_"

    def families(self, moment: Moment) -> Iterator[Metric]:
        totals, report = moment.totals, moment.report
        yield InfoMetricFamily(
            self.prefix + "build",
            "Versions of the server and its libraries.",
            value={**self._labels, **{name: str(value) for name, value in moment.build.items()}},
        )
        yield self.counter("steps", "Steps of the engine.", report.num_steps)
        yield self.counter("requests", "Ended requests, with any outcome.", totals.requests)
        yield self.by_label(
            "replies",
            "Ended replies by outcome.",
            "outcome",
            [(outcome, totals.outcomes[outcome]) for outcome in get_args(Outcome)],
        )
        yield self.counter("prefill_tokens", "Prompt tokens that were computed.", totals.computed_tokens)
        shortfalls = [(kind.value, totals.shortfalls[kind]) for kind in Shortfall]
        yield self.by_label(
            "cache_shortfalls",
            "Replies with fewer cached tokens than the previous turn made likely, by reason.",
            "reason",
            shortfalls,
        )
        yield self.counter("stalls", "Gaps between two tokens that exceed the stall limit.", totals.stalls.num)
        yield self.gauge(
            "longest_stall_seconds",
            "The longest gap between two tokens that exceeded the stall limit.",
            totals.stalls.longest_s,
        )
        yield self.gauge(
            "generation_tokens_per_second",
            "Sampled tokens per second over the last ten seconds.",
            totals.completion_rate.per_second(moment.now),
        )
        yield self.gauge(
            "prefill_tokens_per_second",
            "Computed prompt tokens per second over the last ten seconds.",
            totals.prompt_rate.per_second(moment.now),
        )
        yield from self._memory(moment)
        yield from self._cache(report)

    def _memory(self, moment: Moment) -> Iterator[Metric]:
        fields = cast(dict[str, int], memory_status(moment.memory, moment.report))
        parts = [(name.removesuffix("_bytes"), num) for name, num in fields.items() if name != "total_bytes"]
        yield self.gauge("memory_budget_bytes", "Memory that the server may use.", fields["total_bytes"])
        yield self.parts("memory_bytes", "The memory budget by use.", "part", parts)
        device = moment.report.device
        used = [("active", device.active_bytes), ("peak", device.peak_bytes), ("freed", device.cache_bytes)]
        yield self.parts("device_memory_bytes", "Memory as MLX counts it.", "kind", used)
        if device.system.footprint_bytes is not None:
            yield self.gauge("process_memory_bytes", "Memory as macOS counts it.", device.system.footprint_bytes)

    def _cache(self, report: EngineReport) -> Iterator[Metric]:
        stats, media = report.cache, report.media
        if stats is not None:
            kinds = [*stats.hits.items(), ("miss", stats.misses)]
            yield self.by_label("cache_lookups", "Look-ups in the prefix cache by kind of hit.", "kind", kinds)
            yield self.counter("cache_evictions", "Evictions from the prefix cache.", stats.evictions)
            yield self.counter(
                "cache_evicted_bytes", "Bytes freed by evictions from the prefix cache.", stats.evicted_bytes
            )
            yield self.gauge("cache_paths", "Stored paths in the prefix cache.", stats.entry_count)
            yield self.gauge("cache_states", "Snapshots of recurrent state in the prefix cache.", stats.num_states)
            yield self.gauge("cache_buffers", "Device buffers that the prefix cache holds.", stats.used_buffers)
        if media is not None:
            yield self.counter("images_encoded", "Runs of the vision encoder.", media.num_encoded)
            yield self.counter("image_evictions", "Evictions from the cache of image features.", media.num_evictions)
