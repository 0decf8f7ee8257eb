"""The fewest tokens that a text can have, found without tokenising it. Knows one tokenizer and no request.

A token stands for no more bytes than its own text has. With `w(b) = 1 / length of the longest token that holds the
byte b`, the weights of any token's bytes sum up to at most 1, so that a text has at least the sum of its bytes'
weights in tokens. That holds only where no byte of a text is dropped or merged: see `_is_faithful`.
"""

import json
import math
import unicodedata
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .tokenizer import BYTE_OF_CHAR, Tokenizer

_SLICE = 1 << 16  # characters looked at in one go, so that other threads run in between
_SPACE_SIGN = "▁"  # stands for a space in vocabularies that are not of bytes
_CUT_TOKENS = 16  # more than composing characters across a cut can save
_FAITHFUL_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


class TokenFloor:
    """Any thread may call it. The weights are made at the first call: that takes as long as reading the vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._composes, self._strips, self._has_space_sign = False, False, False
        self._is_known = self._understand()

    def least_tokens(self, text: str) -> int:
        """0 where the tokenizer does something to texts that this does not understand."""
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
        steps = [*_parts(backend.normalizer, "normalizers")]
        self._composes = any(step["type"] == "NFC" for step in steps)
        self._strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        pre_tokenizers = [*_parts(backend.pre_tokenizer, "pretokenizers")]
        is_byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *pre_tokenizers))
        self._has_space_sign = not is_byte_level
        return (
            all(map(_keeps_bytes, steps))
            and all(map(_is_faithful, pre_tokenizers))
            and type(backend.model).__name__ == "BPE"
            and self._knows_all_bytes(is_byte_level)
        )

    def _knows_all_bytes(self, is_byte_level: bool) -> bool:
        """Otherwise a run of unknown characters may be one token, or none."""
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


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those inside of sequences included."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        state = waiting.pop()
        if state["type"] == "Sequence":
            waiting += state[key]
        else:
            yield state


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    """Whether it leaves a text as it is, but for what `_pieces` and the tokens' bytes know of."""
    match normalizer:
        case {"type": "NFC" | "Prepend" | "ByteLevel"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False


def _is_faithful(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether all of a text is in its pieces."""
    return pre_tokenizer["type"] in _FAITHFUL_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"
