"""What each rank says of itself, for the status: workers add it to their heartbeats, and rank 0 reads it there."""

from dataclasses import dataclass
from typing import Any, Self

from ..runner.device import DeviceUsage

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective costs between the ranks."""

    sum_s: float  # a token's sum, with the device's work before and after it
    bytes_per_s: float  # that leave each rank during the sum of a chunk

    def text(self, num_sums: int) -> str:
        """Say what the link costs a token, which waits for so many sums."""
        token_s = num_sums * self.sum_s
        cost = f"{token_s * 1000:.1f} ms a token, so at most {1 / token_s:,.0f} tokens/s a reply"
        return f"a sum takes {self.sum_s * 1000:.2f} ms, and a token waits for {num_sums}: {cost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank, as its last heartbeat describes it."""

    rank: int
    host: str
    active_bytes: int
    peak_bytes: int
    limit_bytes: int
    plan: int  # the last that it has carried out
    lag_plans: int  # that have reached it and are not carried out
    lag_s: float  # since it began with the first of them
    sum_s: float  # that a sum over all ranks took at its start

    @classmethod
    def of(cls, rank: int, host: str, beat: Message) -> Self:
        """Raises KeyError for a heartbeat without figures."""
        active_bytes, peak_bytes, limit_bytes = beat["memory"]
        return cls(
            rank=rank,
            host=host,
            active_bytes=active_bytes,
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
            plan=beat["beat"][1],
            lag_plans=beat["lag"][0],
            lag_s=beat["lag"][1],
            sum_s=beat["sum_s"],
        )


def figures(usage: DeviceUsage, sum_s: float) -> Message:
    """What a heartbeat says beside plans."""
    return {"memory": [usage.active_bytes, usage.peak_bytes, usage.limit_bytes], "sum_s": sum_s}
