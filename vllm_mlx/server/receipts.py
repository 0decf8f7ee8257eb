"""A cache receipt as a response header."""

from ..core.events import GenerationEvent, Started
from ..core.receipt import CacheReceipt

RECEIPT_HEADER = "x-cache-receipt"


def receipt_of(event: GenerationEvent | None) -> CacheReceipt | None:
    return event.receipt if isinstance(event, Started) else None


def receipt_headers(receipt: CacheReceipt | None) -> dict[str, str]:
    """Of the first prompt, where a request carries several."""
    if receipt is None:
        return {}
    facts = f"prompt={receipt.prompt_tokens}; cached={receipt.cached_tokens}; expected={receipt.expected_tokens}"
    if receipt.shortfall is not None:
        facts += f'; reason={receipt.shortfall.value}; detail="{receipt.why}"'
    return {RECEIPT_HEADER: facts}
