"""Refuses prompts that are too long for the model: by their ids, or as texts that certainly cannot fit.

Such a text is not tokenized: a lower bound of the number of its tokens exceeds the limit already. Let
`w(b) = 1 / length of the longest token that contains byte b`. The weights of the bytes of any one token sum to at
most 1, so a text has at least as many tokens as the weights of its bytes sum to. This holds only for tokenizers that
neither drop nor merge bytes of a text: see `_keeps_bytes` and `_keeps_text`.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import ContextLengthExceeded, InvalidParameter
from ..formats.tokenizer import BYTE_OF_CHAR, Tokenizer, steps_of

_COUNTED_TOKENS = 32_768  # a prompt that may be shorter is tokenized even if it cannot fit: the error names its length
_SLICE = 1 << 16  # characters that are counted together, so that other threads run in between
_SPACE_SIGN = "▁"  # represents a space in vocabularies that are not of bytes
_CUT_TOKENS = 16  # characters that compose across a cut save fewer tokens than this
_COMPLETE_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


class ContextWindow:
    """The number of tokens that a prompt and its reply may have. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._floor = TokenFloor(tokenizer)
        self.max_model_len = max_model_len

    def check_text(self, text: str, *, param: str, known_chars: int = 0, known_tokens: int = 0) -> None:
        """Raise ContextLengthExceeded for a text that cannot fit, without tokenizing it.

        `param` is the request field that holds the prompt.
        The first `known_tokens` ids of the prompt are known; they cover its first `known_chars` characters.
        """
        most = max(self.max_model_len, _COUNTED_TOKENS)
        if len(text) < most:
            return
        least = self._floor.least_tokens(text)
        if known_tokens:
            least = min(least, known_tokens - 1 + self._floor.least_tokens(text[known_chars:]))
        if least >= most:
            raise ContextLengthExceeded(
                num_prompt_tokens=least, max_model_len=self.max_model_len, param=param, is_least=True
            )

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise InvalidParameter for an empty prompt, ContextLengthExceeded for one that leaves no room for a reply.

        `param` is the request field that holds the prompt.
        """
        if not token_ids:
            raise InvalidParameter("The prompt is empty: give at least one token.", param=param)
        if len(token_ids) >= self.max_model_len:
            raise ContextLengthExceeded(num_prompt_tokens=len(token_ids), max_model_len=self.max_model_len, param=param)


class TokenFloor:
    """The lower bound for one tokenizer. Threads may share it.

    The first call computes the weights, which takes as long as reading the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._composes, self._strips, self._has_space_sign = False, False, False
        self._is_known = self._understand()

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens. It is 0 if a step of the tokenizer is not known here."""
        if not self._is_known:
            return 0
        counts = np.zeros(256, np.int64)
        num_slices = 0
        for piece in self._pieces(text):
            counts += np.bincount(np.frombuffer(piece, np.uint8), minlength=256)
            num_slices += 1
        least = float(counts @ self._weights) * (1 - 1e-9)
        return max(0, math.floor(least) - (_CUT_TOKENS * num_slices if self._composes else 0))

    def _pieces(self, text: str) -> Iterator[bytes]:
        for start in range(0, len(text), _SLICE):
            piece = text[start : start + _SLICE]
            if self._composes:
                piece = unicodedata.normalize("NFC", piece)
            if self._has_space_sign:
                piece = piece.replace(_SPACE_SIGN, " ")
            if self._strips:
                piece = "".join(piece.split())
            yield piece.encode("utf-8", "surrogatepass")

    def _understand(self) -> bool:
        backend = self._tokenizer.backend
        steps = [*steps_of(backend.normalizer)]
        self._composes = any(step["type"] == "NFC" for step in steps)
        self._strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        pre_tokenizers = [*steps_of(backend.pre_tokenizer)]
        is_byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *pre_tokenizers))
        self._has_space_sign = not is_byte_level
        return (
            all(map(_keeps_bytes, steps))
            and all(map(_keeps_text, pre_tokenizers))
            and type(backend.model).__name__ == "BPE"
            and self._knows_all_bytes(is_byte_level)
        )

    def _knows_all_bytes(self, is_byte_level: bool) -> bool:
        """Return whether each byte has a token. If not, a run of unknown characters may become one token or vanish."""
        backend, kinds = self._tokenizer.backend, self._tokenizer.decoder_types
        if is_byte_level:
            return "ByteLevel" in kinds and all(backend.token_to_id(char) is not None for char in BYTE_OF_CHAR)
        names = (f"<0x{byte:02X}>" for byte in range(256))
        return backend.model.byte_fallback and all(backend.token_to_id(name) is not None for name in names)

    @cached_property
    def _weights(self) -> npt.NDArray[np.float64]:
        longest = np.ones(256)
        for token_id in range(self._tokenizer.vocab_size):
            held = self._tokenizer.token_bytes(token_id)
            if self._has_space_sign:
                held = held.replace(_SPACE_SIGN.encode(), b" ")
            for byte in set(held):
                if len(held) > longest[byte]:
                    longest[byte] = len(held)
        return 1 / longest


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    """Return whether the normalizer changes a text only in ways that `_pieces` and the weights take into account."""
    match normalizer:
        case {"type": "NFC" | "Prepend" | "ByteLevel"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether the pieces of a text together contain the complete text."""
    return pre_tokenizer["type"] in _COMPLETE_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"
