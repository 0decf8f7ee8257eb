"""Writes the figures for Prometheus: under vLLM's names if the meaning is the same, otherwise under our own.

Nothing is counted here. A figure that is a field of the status is declared there; the others are declared here.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast, get_args

from prometheus_client.core import Metric

from ...cache.stats import DiskReport, TreeStats
from ...core.figure import Figure, counter, gauge, readings
from ...ranks.figures import RankRow
from ...scheduler.residence import State
from .counters import Histogram, Outcome, Stalls, Totals
from .schema import DraftStatus, EngineReport, ImageStatus, LaneReport, LaneRow
from .status import Moment, build_facts, memory_status

Readings = Iterator[tuple[Figure, Any]]  # figures and their values
_FINISHED: dict[str, tuple[Outcome, ...]] = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("aborted", "cancelled"),
    "error": ("failed",),
}


def metric_families(moment: Moment) -> Iterable[Metric]:
    """Write all figures. Models share their metrics, whose samples differ by the label `model_name`."""
    families: dict[str, Metric] = {}
    for model, found in _sections(moment):
        for figure, value in found:
            is_own = not figure.name.startswith("vllm:")
            name = f"vllm_mlx_{figure.name}" if is_own else figure.name
            family = families.setdefault(name, Metric(name, figure.help, figure.kind))
            for end, labels, number in _samples(figure, value):
                first = {"model_name": model} if is_own else {"model_name": model, "engine": "0"}
                family.add_sample(name + end, {**first, **labels}, number)
    return families.values()


def _samples(figure: Figure, value: Any) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield the end of the name, the labels and the number of each sample."""
    end = "_total" if figure.kind == "counter" else ""
    match value:
        case Histogram():
            for bound, count in value.buckets():
                yield "_bucket", {"le": "+Inf" if bound == float("inf") else str(float(bound))}, count
            yield "_count", {}, count
            yield "_sum", {}, value.sum
        case Mapping() if figure.kind == "info":
            yield "_info", value, 1
        case Mapping():
            yield from ((end, {figure.label: str(key)}, number) for key, number in value.items())
        case _:
            yield end, {}, value


def _sections(moment: Moment) -> Iterator[tuple[str, Readings]]:
    """Yield the name of a model with figures of it. The figures of the process have the first model's name."""
    report, models = moment.report, [*{one[0]: one for one in moment.models}.values()]  # the last of each name
    first = models[0][0] if models else ""
    yield from ((name, _vllm(moment, lane, totals)) for name, lane, totals in models)
    yield first, iter([(Figure("info", "build", "Versions of the server and its libraries."), build_facts())])
    yield first, readings(EngineReport, report)
    yield from ((name, _own(totals, moment.now)) for name, _, totals in models)
    yield first, _memory(moment)
    if report.cache is not None:
        yield first, _cache(report.cache)
    yield from ((name, readings(ImageStatus, lane.images)) for name, lane, _ in models if lane.images["enabled"])
    yield from ((name, _weights(lane)) for name, lane, _ in models)
    yield from ((name, _drafts(lane.drafts)) for name, lane, _ in models if lane.drafts["enabled"])
    if rows := [cast(dict[str, Any], row) for row in report.ranks]:
        yield first, readings(RankRow, {key: {row["rank"]: row[key] for row in rows} for key in rows[0]})
    if report.disk is not None:
        yield first, _disk(report.disk)


def _vllm(moment: Moment, lane: LaneReport, totals: Totals) -> Readings:
    """Yield the figures that vLLM also has."""
    yield from readings(LaneRow, lane.row, "running", "waiting")
    text, rows_bytes = "Share of the memory for rows and caches that running replies use, 0 to 1.", moment.rows_bytes
    yield gauge("vllm:kv_cache_usage_perc", text), lane.live_bytes / rows_bytes if rows_bytes else 0.0
    yield from readings(LaneReport, lane, "num_preemptions")
    lookups = "Prompt tokens looked up in the prefix cache."
    yield counter("vllm:prefix_cache_queries", lookups), totals.prompt_tokens
    yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."), totals.cached_tokens
    yield from readings(Totals, totals, "prompt_tokens", "cached_tokens", "completion_tokens")
    ended = {reason: sum(totals.outcomes[outcome] for outcome in outcomes) for reason, outcomes in _FINISHED.items()}
    yield counter("vllm:request_success", "Ended replies by finish reason.", "finished_reason"), ended
    yield from ((each.figure, each) for each in vars(totals).values() if isinstance(each, Histogram))


def _own(totals: Totals, now: float) -> Readings:
    """Yield the counts that only this server has."""
    yield from readings(Totals, totals, "requests", "outcomes")
    tiers = {"memory": totals.cached_tokens - totals.disk_tokens, "disk": totals.disk_tokens}
    yield counter("cached_tokens", "Prompt tokens taken from the prefix cache, by tier.", "tier"), tiers
    yield from readings(Totals, totals, "tiers", "computed_tokens", "shortfalls", "encoded_inputs", "encoded_tokens")
    yield from readings(Stalls, totals.stalls)
    text = "tokens per second over the last ten seconds."
    yield gauge("generation_tokens_per_second", f"Sampled {text}"), totals.completion_rate.per_second(now)
    yield gauge("prefill_tokens_per_second", f"Computed prompt {text}"), totals.prompt_rate.per_second(now)


def _memory(moment: Moment) -> Readings:
    parts = cast(dict[str, int], memory_status(moment))
    yield gauge("memory_budget_bytes", "Memory that the server may use."), parts.pop("total_bytes")
    by_use = {name.removesuffix("_bytes"): num_bytes for name, num_bytes in parts.items()}
    yield gauge("memory_bytes", "The memory budget by use.", "part"), by_use
    device = moment.report.device
    used = {"active": device.active_bytes, "peak": device.peak_bytes, "freed": device.cache_bytes}
    yield gauge("device_memory_bytes", "Memory as MLX counts it.", "kind"), used
    if device.system.footprint_bytes is not None:
        yield gauge("process_memory_bytes", "Memory as macOS counts it."), device.system.footprint_bytes


def _cache(stats: TreeStats) -> Readings:
    kinds = {**stats.hits, "miss": stats.misses}
    yield counter("cache_lookups", "Look-ups in the prefix cache by kind of hit.", "kind"), kinds
    yield from readings(TreeStats, stats)


def _weights(lane: LaneReport) -> Readings:
    states = {state: int(state == lane.row["state"]) for state in get_args(State)}
    yield gauge("model_state", "Where the weights are: 1 for the present state.", "state"), states
    yield from readings(LaneRow, lane.row, "loads", "load_s", "ahead_tokens")
    yield from readings(LaneReport, lane, "build_s")
    yield from readings(LaneRow, lane.row, "missing_bytes")


def _drafts(drafts: DraftStatus) -> Readings:
    """Yield the sums under vLLM's names, and the same by source."""
    yield from readings(DraftStatus, drafts, "num_drafts")
    drafted, accepted = sum(drafts["drafted_tokens"].values()), sum(drafts["accepted_tokens"].values())
    yield counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted."), drafted
    yield counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."), accepted
    text = "Drafted tokens that were accepted, by position in the draft."
    places = dict(enumerate(drafts["accepted_by_position"]))
    yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, "position"), places
    yield from readings(DraftStatus, drafts, "drafted_tokens", "accepted_tokens")


def _disk(disk: DiskReport) -> Readings:
    text = "Whether the prefix cache is kept on disk (1), or an error has turned that off (0)."
    yield gauge("disk_works", text), int(disk.off_reason is None)
    yield from readings(DiskReport, disk)
