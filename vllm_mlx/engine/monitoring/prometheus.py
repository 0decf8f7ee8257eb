"""The engine's figures as Prometheus reads them: vLLM's names where the meaning is the same, ours beside them.

Nothing is counted here: families are made when somebody asks, from what the event loop and the engine count anyway.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ...core.memory import MemoryBudget
from ...core.receipt import Shortfall
from .counters import Outcome, Totals
from .report import EngineReport
from .status import memory_fields
from .windows import Histogram

_FINISHED: dict[str, tuple[Outcome, ...]] = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("aborted", "cancelled"),
    "error": ("failed",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All of one moment."""

    model: str
    build: Mapping[str, str]
    memory: MemoryBudget
    report: EngineReport
    totals: Totals
    now: float


def metric_families(figures: Figures) -> Iterator[Metric]:
    yield from _Theirs(figures.model).families(figures)
    yield from _Ours(figures.model).families(figures)


class _Families:
    """Makes families of one prefix, every sample of which names the model."""

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


class _Theirs(_Families):
    """vLLM's."""

    prefix = "vllm:"

    def __init__(self, model: str):
        super().__init__(model)
        self._labels["engine"] = "0"

    def families(self, figures: Figures) -> Iterator[Metric]:
        yield from self._state(figures)
        yield from self._counts(figures)
        yield from self._latencies(figures.totals)

    def _state(self, figures: Figures) -> Iterator[Metric]:
        report, rows_bytes = figures.report, figures.memory.rows_bytes
        yield self.gauge("num_requests_running", "Replies that prefill or decode.", report.num_running)
        yield self.gauge("num_requests_waiting", "Replies that wait for a place.", report.num_waiting)
        used = report.live_bytes / rows_bytes if rows_bytes else 0.0
        yield self.gauge(
            "kv_cache_usage_perc", "Share of the memory for state that running replies hold, 0 to 1.", used
        )

    def _counts(self, figures: Figures) -> Iterator[Metric]:
        totals = figures.totals
        yield self.counter(
            "num_preemptions", "Replies that gave their memory back for a while.", figures.report.num_preemptions
        )
        yield self.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens)
        yield self.counter(
            "prefix_cache_hits", "Prompt tokens found there and not computed again.", totals.cached_tokens
        )
        yield self.counter("prompt_tokens", "Prompt tokens, cached ones included.", totals.prompt_tokens)
        yield self.counter("prompt_tokens_cached", "Prompt tokens that were not computed again.", totals.cached_tokens)
        yield self.counter("generation_tokens", "Sampled tokens.", totals.completion_tokens)
        ended = [(reason, sum(totals.outcomes[each] for each in outcomes)) for reason, outcomes in _FINISHED.items()]
        yield self.by_label("request_success", "Replies that ended, by how.", "finished_reason", ended)

    def _latencies(self, totals: Totals) -> Iterator[Metric]:
        for name, text, counted in (
            ("time_to_first_token_seconds", "From arrival to the first token.", totals.ttft.histogram),
            ("inter_token_latency_seconds", "Between two tokens of one reply.", totals.gap.histogram),
            ("e2e_request_latency_seconds", "From arrival to the last token.", totals.e2e.histogram),
            ("request_queue_time_seconds", "Waiting for a place.", totals.queue.histogram),
            ("request_prefill_time_seconds", "From having a place to the first token.", totals.prefill.histogram),
            ("request_decode_time_seconds", "From the first token to the last.", totals.decode.histogram),
            ("request_prompt_tokens", "Prompt tokens of replies that finished.", totals.prompt_sizes),
            ("request_generation_tokens", "Sampled tokens of replies that finished.", totals.reply_sizes),
        ):
            yield self.histogram(name, text, counted)


class _Ours(_Families):
    prefix = "vllm_mlx_"

    def families(self, figures: Figures) -> Iterator[Metric]:
        totals, report = figures.totals, figures.report
        yield InfoMetricFamily(self.prefix + "build", "Versions.", value={**self._labels, **figures.build})
        yield self.counter("steps", "Steps of the engine.", report.num_steps)
        yield self.counter("requests", "Requests that ended, whichever way.", totals.requests)
        yield self.by_label(
            "replies", "Replies that ended.", "outcome", [(each, totals.outcomes[each]) for each in get_args(Outcome)]
        )
        yield self.counter("prefill_tokens", "Prompt tokens that were computed.", totals.computed_tokens)
        shortfalls = [(each.value, totals.shortfalls[each]) for each in Shortfall]
        yield self.by_label(
            "cache_shortfalls", "Replies less cached than an earlier turn let expect.", "reason", shortfalls
        )
        yield self.counter("stalls", "Gaps between two tokens beyond --max-stall-ms.", totals.stalls.num)
        yield self.gauge("longest_stall_seconds", "The longest of them.", totals.stalls.longest_s)
        yield self.gauge(
            "generation_tokens_per_second", "Over the last ten seconds.", totals.completion_rate.per_second(figures.now)
        )
        yield self.gauge(
            "prefill_tokens_per_second", "Over the last ten seconds.", totals.prompt_rate.per_second(figures.now)
        )
        yield from self._memory(figures)
        yield from self._cache(report)

    def _memory(self, figures: Figures) -> Iterator[Metric]:
        fields = memory_fields(figures.memory, figures.report)
        parts = [(name.removesuffix("_bytes"), value) for name, value in fields.items() if name != "total_bytes"]
        yield self.gauge("memory_budget_bytes", "All that the server may take.", fields["total_bytes"])
        yield self.parts("memory_bytes", "The budget by what it is spent on.", "part", parts)
        device = figures.report.device
        used = [("active", device.active_bytes), ("peak", device.peak_bytes), ("freed", device.cache_bytes)]
        yield self.parts("device_memory_bytes", "As MLX counts it.", "kind", used)

    def _cache(self, report: EngineReport) -> Iterator[Metric]:
        stats, media = report.cache, report.media
        if stats is not None:
            kinds = [*stats.hits.items(), ("miss", stats.misses)]
            yield self.by_label("cache_lookups", "Look-ups in the prefix cache, by what they found.", "kind", kinds)
            yield self.counter("cache_evictions", "Parts of the prefix cache taken to make room.", stats.evictions)
            yield self.counter("cache_evicted_bytes", "What that freed.", stats.evicted_bytes)
            yield self.gauge("cache_paths", "Paths that the prefix cache holds.", stats.entry_count)
            yield self.gauge("cache_states", "Copies of recurrent state among them.", stats.num_states)
        if media is not None:
            yield self.counter("images_encoded", "Runs of the vision tower.", media.num_encoded)
            yield self.counter("image_evictions", "Encoded images taken to make room.", media.num_evictions)
