"""From moments to figures: what a person compares. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .load import Timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one workload at one concurrency. None: nothing to take it from."""

    workload: str
    concurrency: int
    requests: int
    failed: int
    first_error: str | None
    seconds: float  # from the first request to the last part of a reply
    prompt_tokens: int  # of all requests; 0 where the server does not count
    cached_tokens: int
    reply_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None  # between two parts of a reply
    itl_p99_s: float | None
    tokens_per_s: float  # of all replies together

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def figures(workload: str, concurrency: int, replies: Sequence[Timed]) -> Figures:
    good = [reply for reply in replies if reply.error is None]
    errors = [reply.error for reply in replies if reply.error is not None]
    ttfts = [reply.moments[0] - reply.sent_s for reply in good]
    gaps = [later - earlier for reply in good for earlier, later in pairwise(reply.moments)]
    seconds = max(reply.moments[-1] for reply in good) - min(reply.sent_s for reply in good) if good else 0.0
    reply_tokens = sum(reply.num_tokens for reply in good)
    return Figures(
        workload=workload,
        concurrency=concurrency,
        requests=len(replies),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        prompt_tokens=sum(int(reply.usage.get("prompt_tokens") or 0) for reply in good),
        cached_tokens=sum(_cached(reply) for reply in good),
        reply_tokens=reply_tokens,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        tokens_per_s=reply_tokens / seconds if seconds else 0.0,
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, int(rank) - 1)]


def _cached(reply: Timed) -> int:
    return int((reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
