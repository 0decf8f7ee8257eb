"""The cache receipts of one request, and the response header that tells them. Knows no protocol."""

from ..core.events import GenerationEvent, Started
from ..core.receipt import CacheReceipt

RECEIPT_HEADER = "x-cache-receipt"


class Receipts:
    """One for each prompt: that of the choice which computed most of it, as the usage block counts."""

    def __init__(self, *, num_prompts: int = 1, choices_per_prompt: int = 1) -> None:
        self._num_prompts = num_prompts
        self._choices_per_prompt = choices_per_prompt
        self._heard_of: set[int] = set()
        self._by_prompt: dict[int, CacheReceipt] = {}

    def take(self, index: int, event: GenerationEvent) -> bool:
        """An event of the choice `index`. Returns whether every prompt has been heard of: started, or failed."""
        prompt = index // self._choices_per_prompt
        self._heard_of.add(prompt)
        if isinstance(event, Started) and event.receipt is not None:
            known = self._by_prompt.setdefault(prompt, event.receipt)
            if event.receipt.cached_tokens < known.cached_tokens:
                self._by_prompt[prompt] = event.receipt
        return len(self._heard_of) == self._num_prompts

    def total(self) -> CacheReceipt | None:
        """None until every prompt has one. Several are texts to complete, of which nothing is expected."""
        receipts = list(self._by_prompt.values())
        if len(receipts) < self._num_prompts:
            return None
        if len(receipts) == 1:
            return receipts[0]
        return CacheReceipt(
            prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
            cached_tokens=sum(receipt.cached_tokens for receipt in receipts),
            stored_tokens=sum(receipt.stored_tokens for receipt in receipts),
        )

    def headers(self) -> dict[str, str]:
        receipt = self.total()
        if receipt is None:
            return {}
        facts = f"prompt={receipt.prompt_tokens}; cached={receipt.cached_tokens}; expected={receipt.expected_tokens}"
        if self._num_prompts > 1:
            facts += f"; prompts={self._num_prompts}"
        if receipt.shortfall is not None:
            facts += f'; reason={receipt.shortfall.value}; detail="{receipt.why}"'
        return {RECEIPT_HEADER: facts}
