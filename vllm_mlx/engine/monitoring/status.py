"""Fills the status from the figures of the engine and of the event loop."""

import platform
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import mlx.core as mx

from ... import __version__
from ...cache.media import MediaCache
from ...cache.tree import MemoryAwarePrefixCache
from ...core.memory import MemoryBudget, SystemMemory
from ...scheduler.ahead import Fate
from ...scheduler.drafts import SOURCES
from ...scheduler.speculation import Speculation
from ..front import Front
from ..macos import resident_bytes
from .counters import RATE_WINDOW_S, SAMPLE_WINDOW_S, ReplyStats, Totals
from .schema import (
    CacheStatus,
    Counts,
    DraftStatus,
    EngineReport,
    EngineStatus,
    ImageStatus,
    LaneReport,
    LatencyStatus,
    MemoryStatus,
    ModelRow,
    PressureStatus,
    ProcessStatus,
    SystemStatus,
)

_GB = 1e9
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The sources of all figures at one moment. `now` is a time of the monotonic clock."""

    fronts: Items[Front]  # the models by their positions
    report: EngineReport
    report_age_s: float
    totals: Totals  # of all models together
    totals_of_models: Items[Totals]
    total_bytes: int  # of the memory budget
    now: float

    @property
    def models(self) -> list[tuple[str, LaneReport, Totals]]:
        names = (front.name for front in self.fronts)
        return list(zip(names, self.report.lanes, self.totals_of_models, strict=False))

    @property
    def memory(self) -> list[MemoryBudget]:
        """Return the memory budget as each model sees it."""
        return [front.facts.memory for front in self.fronts]

    @property
    def rows_bytes(self) -> int:
        """Return the memory that is planned for rows and caches beside the weights that are in memory now."""
        weights_bytes = sum(lane.row["weights_bytes"] for lane in self.report.lanes)
        kept_bytes = sum(each.media_bytes + each.grammars_bytes for each in self.memory)
        return self.total_bytes - weights_bytes - kept_bytes - self.step_bytes

    @property
    def step_bytes(self) -> int:
        """Return the memory of one step of any model whose weights are in memory."""
        lanes = zip(self.memory, self.report.lanes, strict=False)
        return max((memory.transient_bytes for memory, lane in lanes if lane.row["weights_bytes"]), default=0)


def engine_status(moment: Moment, replies: Iterable[ReplyStats], num_refused: int) -> EngineStatus:
    """Write the status. `replies`: all that wait or run. `num_refused`: requests that never began."""
    report, totals, now = moment.report, moment.totals, moment.now
    facts = moment.fronts[0].model_facts if moment.fronts else None
    there = {name for name, lane, _ in moment.models if lane.row["state"] in ("ready", "leaving")}
    models = [(front.name, front.name in there) for front in moment.fronts]
    running = [reply.describe(now, models, report.reading) for reply in replies]
    status: EngineStatus = {
        "status": "running" if running else "idle",
        "model": facts and facts["model"],
        "architecture": facts and facts["architecture"],
        "max_model_len": facts and facts["max_model_len"],
        "uptime_s": round(now - totals.started_s, 1),
        "steps_executed": report.num_steps,
        "num_running": sum(lane.row["running"] for lane in report.lanes),
        "num_waiting": sum(lane.row["waiting"] for lane in report.lanes),
        "num_preemptions": sum(lane.num_preemptions for lane in report.lanes),
        "num_restarts": sum(lane.num_restarts for lane in report.lanes),
        **_counts(totals, now),
        "rate_window_s": RATE_WINDOW_S,
        "latency": _latency(totals, now),
        "stalls": totals.stalls,
        "outcomes": {**totals.outcomes},
        "metal": {
            "active_memory_gb": round(report.device.active_bytes / _GB, 4),
            "peak_memory_gb": round(report.device.peak_bytes / _GB, 4),
            "cache_memory_gb": round(report.device.cache_bytes / _GB, 4),
            "limit_memory_gb": round(report.device.limit_bytes / _GB, 4),
        },
        "system": _system(report.device.system),
        "process": _process(moment),
        "memory": memory_status(moment),
        "shrinking": _pressure(report, num_refused),
        "cache": _cache(report, totals),
        "images": report.images,
        "drafts": report.drafts,
        "ahead_tokens": {fate: sum(lane.row["ahead_tokens"][fate] for lane in report.lanes) for fate in get_args(Fate)},
        "models": [_model(*model, now) for model in moment.models],
        "ranks": list(report.ranks),
        "model_facts": facts,
        "build": build_facts(),
        "report_age_s": round(moment.report_age_s, 2),
        "requests": running,
    }
    if not report.ranks:
        del status["ranks"]
    return status


def _counts(totals: Totals, now: float) -> Counts:
    return {
        "total_requests_processed": totals.requests,
        "total_prompt_tokens": totals.prompt_tokens,
        "total_cached_tokens": totals.cached_tokens,
        "total_disk_tokens": totals.disk_tokens,
        "total_completion_tokens": totals.completion_tokens,
        "total_encoded_inputs": totals.encoded_inputs,
        "total_encoded_tokens": totals.encoded_tokens,
        "generation_tps": round(totals.completion_rate.per_second(now), 2),
        "prompt_tps": round(totals.prompt_rate.per_second(now), 2),
    }


def _model(name: str, lane: LaneReport, totals: Totals, now: float) -> ModelRow:
    return {
        "name": name,
        **lane.row,
        **_counts(totals, now),
        "outcomes": {**totals.outcomes},
        "drafts": lane.drafts,
    }


def _latency(totals: Totals, now: float) -> LatencyStatus:
    return {
        "window_s": SAMPLE_WINDOW_S,
        "ttft_s": totals.ttft.quantiles(now),
        "inter_token_s": totals.gap.quantiles(now),
        "queue_s": totals.queue.quantiles(now),
        "prefill_s": totals.prefill.quantiles(now),
        "e2e_s": totals.e2e.quantiles(now),
    }


def _system(system: SystemMemory) -> SystemStatus:
    footprint, pressure = system.footprint_bytes, system.pressure
    return {
        "process_memory_gb": None if footprint is None else round(footprint / _GB, 4),
        "pressure": None if pressure is None else pressure.value,
    }


def _process(moment: Moment) -> ProcessStatus:
    device = moment.report.device
    total = resident_bytes() if device.system.footprint_bytes is None else device.system.footprint_bytes
    pixels_bytes = sum(front.media.pixels_bytes for front in moment.fronts)
    replies_bytes = sum(front.processor.replies.num_bytes for front in moment.fronts)
    named_bytes = device.active_bytes + device.cache_bytes + pixels_bytes + replies_bytes
    return {
        "total_bytes": total,
        "mlx_active_bytes": device.active_bytes,
        "mlx_freed_bytes": device.cache_bytes,
        "pixels_bytes": pixels_bytes,
        "replies_bytes": replies_bytes,
        "other_bytes": None if total is None else total - named_bytes,
    }


def memory_status(moment: Moment) -> MemoryStatus:
    """Divide the budget. `free_bytes` is left for rows and caches.

    `lacking_bytes` were planned for them too, but the device turned out not to have them.
    """
    report = moment.report
    live_bytes = sum(lane.live_bytes for lane in report.lanes)
    media_bytes = sum(lane.media_bytes for lane in report.lanes)
    cache_bytes = 0 if report.cache is None else report.cache.used_bytes
    free_bytes = max(0, moment.rows_bytes - live_bytes - cache_bytes - media_bytes)
    lacking_bytes = min(free_bytes, max((lane.lacking_bytes for lane in report.lanes), default=0))
    return {
        "total_bytes": moment.total_bytes,
        "weights_bytes": sum(lane.row["weights_bytes"] for lane in report.lanes),
        "transient_bytes": moment.step_bytes + sum(memory.grammars_bytes for memory in moment.memory),
        "live_bytes": live_bytes,
        "cache_bytes": cache_bytes,
        "media_bytes": media_bytes,
        "image_bytes": sum(memory.media_bytes for memory in moment.memory),
        "lacking_bytes": lacking_bytes,
        "free_bytes": free_bytes - lacking_bytes,
    }


def _pressure(report: EngineReport, num_refused: int) -> PressureStatus:
    return {
        "shorter_chunks": sum(lane.num_shortened for lane in report.lanes),
        "cache_evictions": 0 if report.cache is None else report.cache.evictions,
        "image_evictions": sum(lane.images["evictions"] for lane in report.lanes),
        "waiting": sum(lane.row["waiting"] for lane in report.lanes),
        "preemptions": sum(lane.num_preemptions for lane in report.lanes),
        "refused": num_refused,
    }


def image_status(*models: MediaCache[Any] | None) -> ImageStatus:
    """Describe the caches of image features of these models together. One that takes no images has None."""
    kept = [media for media in models if media is not None]
    status: ImageStatus = {
        "enabled": bool(kept),
        "encoded": sum(media.num_encoded for media in kept),
        "longest_encode_s": round(max((media.longest_encode_s for media in kept), default=0.0), 3),
        "evictions": sum(media.num_evictions for media in kept),
        "entry_count": sum(map(len, kept)),
        "current_memory_mb": round(sum(media.used_bytes for media in kept) / _MB, 3),
    }
    if kept:
        status["max_memory_mb"] = round(sum(media.max_bytes for media in kept) / _MB, 3)
    return status


def draft_status(off_reason: str | None, *models: Speculation | None) -> DraftStatus:
    """Describe the drafts of these models together. One whose drafts are off has None."""
    drafting = [speculation for speculation in models if speculation is not None]
    num_drafts, parked = sum(each.num_drafts for each in drafting), [each.parked for each in drafting]
    accepted = {source: sum(each.num_accepted[source] for each in drafting) for source in SOURCES}
    return {
        "enabled": bool(drafting),
        "off_reason": None if drafting else off_reason,
        "parked": parked[0] if parked and all(parked) else None,
        "num_passes": sum(each.num_passes for each in drafting),
        "num_drafts": num_drafts,
        "drafted_tokens": {source: sum(each.num_drafted[source] for each in drafting) for source in SOURCES},
        "accepted_tokens": accepted,
        "accepted_by_position": [sum(at) for at in zip(*(each.num_accepted_at for each in drafting), strict=True)],
        "tokens_per_pass": round(1 + sum(accepted.values()) / max(1, num_drafts), 2),
    }


def _cache(report: EngineReport, totals: Totals) -> CacheStatus:
    stats = MemoryAwarePrefixCache(max_bytes=0).stats if report.cache is None else report.cache
    lookups = stats.num_hits + stats.misses
    status: CacheStatus = {
        "enabled": report.cache is not None,
        "hits": stats.num_hits,
        "hits_by_kind": stats.hits,
        "hits_by_tier": {**totals.tiers},
        "misses": stats.misses,
        "hit_rate": round(stats.num_hits / lookups, 4) if lookups else 0.0,
        "evictions": stats.evictions,
        "evicted_mb": round(stats.evicted_bytes / _MB, 3),
        "tokens_saved": stats.tokens_saved,
        "current_memory_mb": round(stats.used_bytes / _MB, 3),
        "max_memory_mb": round(stats.max_bytes / _MB, 3),
        "memory_utilization": round(stats.used_bytes / stats.max_bytes, 4) if stats.max_bytes else 0.0,
        "entry_count": stats.entry_count,
        "num_states": stats.num_states,
        "num_buffers": stats.used_buffers,
        "index_mb": round(stats.index_bytes / _MB, 3),
        "inserts_refused": stats.inserts_refused + sum(lane.num_skipped_captures for lane in report.lanes),
        "shortfalls": {**totals.shortfalls},
        "disk": report.disk,
    }
    if report.cache is None:
        status["hits_by_kind"] = {}
        del status["evicted_mb"], status["num_states"], status["num_buffers"]
        del status["index_mb"], status["inserts_refused"]
    return status


@cache
def build_facts() -> dict[str, str]:
    """Return versions; an empty text for a package that is not installed."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": "metal" if mx.metal.is_available() else "cpu",
        **{name: _version(name) for name in ("mlx", "mlx_lm", "mlx_vlm", "transformers", "llguidance")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
