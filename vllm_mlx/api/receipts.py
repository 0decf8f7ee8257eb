"""The part of a usage block that says why less was cached than expected; the same in all protocols."""

from ..core.receipt import CacheReceipt
from .reply import Reply


class CacheShortfall(Reply):
    reason: str
    expected_tokens: int
    stored_tokens: int
    detail: str


def shortfall_of(receipt: CacheReceipt | None) -> CacheShortfall | None:
    """None where nothing fell short."""
    if receipt is None or receipt.shortfall is None:
        return None
    return CacheShortfall(
        reason=receipt.shortfall.value,
        expected_tokens=receipt.expected_tokens,
        stored_tokens=receipt.stored_tokens,
        detail=receipt.why or "",
    )
