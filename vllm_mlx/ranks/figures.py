"""Figures of each rank for the status: workers add them to their heartbeats, and rank 0 reads them there."""

from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ..core.figure import gauge
from ..runner.device import DeviceUsage


class RankRow(TypedDict):
    """One of the Macs that run a model together, rank 0 the first: its memory as MLX counts it, and its progress.

    `plan` is the last step that it has carried out, `lag_plans` counts those that have reached it and are not carried
    out, and `lag_s` is how long it has worked on the first of them. `sum_s` was measured at start: a sum over all
    Macs, of which each token waits for two a layer.
    """

    rank: int
    host: str
    plan: Annotated[int, gauge("rank_plan", "The last plan of a step that a rank has carried out.", "rank")]
    lag_plans: Annotated[
        int, gauge("rank_lag_plans", "Plans that have reached a rank and are not carried out.", "rank")
    ]
    lag_s: Annotated[
        float, gauge("rank_lag_seconds", "Seconds for which a rank has worked on the first of these plans.", "rank")
    ]
    active_bytes: Annotated[int, gauge("rank_memory_bytes", "Memory of a rank as MLX counts it.", "rank")]
    peak_bytes: int
    limit_bytes: int
    sum_s: Annotated[
        float, gauge("rank_sum_seconds", "Seconds that a sum over all ranks took at the start of a rank.", "rank")
    ]


def figures(usage: DeviceUsage, sum_s: float) -> dict[str, Any]:
    """Return the part of a row that its rank alone knows."""
    memory = {"active_bytes": usage.active_bytes, "peak_bytes": usage.peak_bytes, "limit_bytes": usage.limit_bytes}
    return {**memory, "sum_s": round(sum_s, 6)}


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a collective between the ranks."""

    sum_s: float  # a token's sum, with the device's work before and after it
    bytes_per_s: float  # that leave each rank during the sum of a chunk

    def text(self, num_sums: int) -> str:
        """Describe the cost of the link for a token, which waits for this number of sums."""
        token_s = num_sums * self.sum_s
        cost = f"{token_s * 1000:.1f} ms a token, so at most {1 / token_s:,.0f} tokens/s a reply"
        return f"a sum takes {self.sum_s * 1000:.2f} ms, and a token waits for {num_sums}: {cost}"
