"""Puts the figures of the engine and of its front into the words that monitors of such servers read."""

from collections.abc import Iterable
from typing import Any

from ..core.config import ModelInfo
from ..core.memory import MemoryBudget
from .report import EngineReport
from .stats import ReplyStats, Totals

_GB = 1e9
_MB = 1e6


def status_fields(
    *,
    info: ModelInfo,
    memory: MemoryBudget,
    report: EngineReport,
    totals: Totals,
    replies: Iterable[ReplyStats],
    now: float,
) -> dict[str, Any]:
    running = list(replies)
    return {
        "status": "running" if running else "idle",
        "model": info.model,
        "architecture": info.architecture,
        "max_model_len": info.max_model_len,
        "uptime_s": round(now - totals.started_s, 1),
        "steps_executed": report.num_steps,
        "num_running": report.num_running,
        "num_waiting": report.num_waiting,
        "num_preemptions": report.num_preemptions,
        "total_requests_processed": totals.requests,
        "total_prompt_tokens": totals.prompt_tokens,
        "total_cached_tokens": totals.cached_tokens,
        "total_completion_tokens": totals.completion_tokens,
        "generation_tps": round(totals.completion_rate.per_second(now), 2),
        "prompt_tps": round(totals.prompt_rate.per_second(now), 2),
        "metal": {
            "active_memory_gb": round(report.device.active_bytes / _GB, 4),
            "peak_memory_gb": round(report.device.peak_bytes / _GB, 4),
            "cache_memory_gb": round(report.device.cache_bytes / _GB, 4),
        },
        "memory": memory_fields(memory, report),
        "cache": cache_fields(report),
        "requests": [reply.to_dict(now) for reply in running],
    }


def memory_fields(memory: MemoryBudget, report: EngineReport) -> dict[str, int]:
    """The four parts of the budget, in bytes."""
    return {
        "total_bytes": memory.total_bytes,
        "weights_bytes": memory.weights_bytes,
        "transient_bytes": memory.transient_bytes,
        "live_bytes": report.live_bytes,
        "cache_bytes": 0 if report.cache is None else report.cache.used_bytes,
    }


def cache_fields(report: EngineReport) -> dict[str, Any]:
    stats = report.cache
    if stats is None:
        return {
            "enabled": False,
            "hits": 0,
            "misses": 0,
            "hit_rate": 0.0,
            "evictions": 0,
            "tokens_saved": 0,
            "current_memory_mb": 0.0,
            "max_memory_mb": 0.0,
            "memory_utilization": 0.0,
            "entry_count": 0,
        }
    lookups = stats.num_hits + stats.misses
    return {
        "enabled": True,
        "hits": stats.num_hits,
        "hits_by_kind": dict(stats.hits),
        "misses": stats.misses,
        "hit_rate": round(stats.num_hits / lookups, 4) if lookups else 0.0,
        "evictions": stats.evictions,
        "tokens_saved": stats.tokens_saved,
        "current_memory_mb": round(stats.used_bytes / _MB, 3),
        "max_memory_mb": round(stats.max_bytes / _MB, 3),
        "memory_utilization": round(stats.used_bytes / stats.max_bytes, 4) if stats.max_bytes else 0.0,
        "entry_count": stats.entry_count,
        "num_states": stats.num_states,
        "index_mb": round(stats.index_bytes / _MB, 3),
        "inserts_refused": stats.inserts_refused + report.num_skipped_captures,
    }
