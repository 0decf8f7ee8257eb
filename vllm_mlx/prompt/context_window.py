"""Refuses prompts that are too long for the model: a text before it is tokenized where that is certain, then ids."""

from collections.abc import Sequence

from ..core.errors import ContextLengthExceeded, InvalidParameter
from ..tokens.token_floor import TokenFloor
from ..tokens.tokenizer import Tokenizer

_COUNTED_TOKENS = 32_768  # a prompt that may be shorter is tokenized even if it cannot fit: the error names its length


class ContextWindow:
    """The number of tokens that a prompt and its reply may have. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._floor = TokenFloor(tokenizer)
        self.max_model_len = max_model_len

    def check_text(self, text: str, *, known_chars: int = 0, known_tokens: int = 0) -> None:
        """Raises ContextLengthExceeded for a text that cannot fit, without tokenizing it.

        The first `known_tokens` ids of the prompt are known; they stand for its first `known_chars` characters.
        """
        most = max(self.max_model_len, _COUNTED_TOKENS)
        if len(text) < most:
            return
        least = self._floor.least_tokens(text)
        if known_tokens:
            least = min(least, known_tokens - 1 + self._floor.least_tokens(text[known_chars:]))
        if least >= most:
            raise ContextLengthExceeded(num_prompt_tokens=least, max_model_len=self.max_model_len, is_least=True)

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raises InvalidParameter for an empty prompt, ContextLengthExceeded for one without room for a reply.

        `param` is the request field that holds the prompt.
        """
        if not token_ids:
            raise InvalidParameter("The prompt is empty: give at least one token.", param=param)
        if len(token_ids) >= self.max_model_len:
            raise ContextLengthExceeded(num_prompt_tokens=len(token_ids), max_model_len=self.max_model_len)
