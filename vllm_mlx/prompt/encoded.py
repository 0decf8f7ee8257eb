"""A rendered text and its ids. Knows which ids other texts share with it, and nothing of conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..tokens.detokenizer import context_ids
from ..tokens.tokenizer import Tokenizer
from .reply_memory import Remembered

_WINDOW = 64  # tokens before a place that decide how it is tokenised, where no added token lies nearer
_LOOKAHEAD = 256  # characters


@dataclass(frozen=True, slots=True)
class Base:
    """The first `num_tokens` of an earlier prompt and its reply stand for the first `num_chars` of a text."""

    entry: Remembered
    num_chars: int
    num_tokens: int

    @property
    def last_id(self) -> int:
        return self.entry.token_id(self.num_tokens - 1)


class Encoded:
    """A text and its ids: those of a base, then a tokenised tail. Tells which ids other texts share."""

    def __init__(self, tokenizer: Tokenizer, text: str, base: Base | None, start: int, encoding: tokenizers.Encoding):
        """`encoding` is that of `text[start:]`; with a base, its first token may be the base's last."""
        self._tokenizer = tokenizer
        self.text = text
        self.base = base
        self._start = start
        self._encoding = encoding
        self._ids: list[int] = encoding.ids
        self._num_before = 0
        before: list[int] = []
        if base is not None:
            self._num_before = base.num_tokens - (start < base.num_chars)
            before = base.entry.token_ids(self._num_before)
        self.token_ids = (*before, *self._ids)

    def common(self, other: str) -> tuple[int, int]:
        """The longest run of ids that `other`, rendered for the same model, begins with: (characters, tokens)."""
        end = common_prefix(self.text, other)
        if end == len(self.text) == len(other):
            return end, len(self.token_ids)
        if self.base is not None and end <= self.base.num_chars:
            return self.boundary(end)
        start = self._window(end)
        mine, theirs = (self._tokenizer.encoding(text[start : end + _LOOKAHEAD]) for text in (self.text, other))
        num_common = common_prefix(mine.ids, theirs.ids)
        return self.boundary(start + _clean_end(mine, num_common))

    def before_space(self, point: tuple[int, int]) -> tuple[int, int]:
        """The boundary at or before this one that white space does not precede: it joins with white space behind it."""
        end = point[0]
        while end and self.text[end - 1].isspace():
            while end and self.text[end - 1].isspace():
                end -= 1
            point = self.boundary(end)
            end = point[0]
        return point

    def _window(self, end: int) -> int:
        """Where to begin tokenising so that the ids around `end` come out as in the whole text."""
        last = self._token_at(end - 1)
        if last is None:
            return self._start
        for index in range(last, max(-1, last - _WINDOW), -1):
            if self._tokenizer.added_token(self._ids[index]) is not None:
                last = index
                break
        else:
            last = max(0, last - _WINDOW)
        span = self._encoding.token_to_chars(last)
        return self._start + (0 if span is None else span[0])

    def boundary(self, end: int) -> tuple[int, int]:
        """The last boundary between tokens at or before character `end`."""
        if self.base is not None and end <= self.base.num_chars:
            return self.base.entry.mark(end)
        index = self._token_at(end - 1)
        if index is None:
            return (0, 0) if self.base is None else self.base.entry.mark(end)
        while (
            index < len(self._ids) and (span := self._encoding.token_to_chars(index)) and self._start + span[1] <= end
        ):
            index += 1
        span = self._encoding.token_to_chars(index - 1) if index else None
        if span is None:
            return (0, 0) if self.base is None else self.base.entry.mark(end)
        return self._start + span[1], self._num_before + index

    def _token_at(self, position: int) -> int | None:
        """Index, in the tail, of the token that holds a character of the text, or of the nearest one before it."""
        for char in range(position - self._start, max(-1, position - self._start - _WINDOW), -1):
            index = self._encoding.char_to_token(char)
            if index is not None:
                return int(index)
        return None


def _clean_end(encoding: tokenizers.Encoding, num_tokens: int) -> int:
    """Characters that the first `num_tokens` stand for, without one whose bytes reach into the next token."""
    for index in range(num_tokens, 0, -1):
        before, after = encoding.token_to_chars(index - 1), encoding.token_to_chars(index)
        if before is not None and (after is None or before[1] <= after[0]):
            return before[1]
    return 0


def encode(tokenizer: Tokenizer, text: str, base: Base | None = None) -> Encoded:
    """The base's ids where the rest can be tokenised without what stands before it, else the ids of the text alone."""
    if base is not None:
        added = tokenizer.added_token(base.last_id)
        if added is not None and text.endswith(added[0], 0, base.num_chars):
            start = base.num_chars - len(added[0])
            encoding = tokenizer.encoding(text[start:])
            if encoding.ids[:1] == [base.last_id]:
                return Encoded(tokenizer, text, base, start, encoding)
        rest = text[base.num_chars :]
        encoding = tokenizer.encoding(rest)
        if _is_faithful(tokenizer, base, encoding.ids, rest):
            return Encoded(tokenizer, text, base, base.num_chars, encoding)
    return Encoded(tokenizer, text, None, 0, tokenizer.encoding(text))


def _is_faithful(tokenizer: Tokenizer, base: Base, token_ids: list[int], text: str) -> bool:
    """Added tokens part what stands on their two sides. Else, some tokenizers put a space before any text."""
    if not token_ids or tokenizer.added_token(token_ids[0]) is not None:
        return True
    context = context_ids(tokenizer, [base.last_id])
    return tokenizer.decode([*context, *token_ids])[len(tokenizer.decode(context)) :] == text


def common_prefix(a: str | Sequence[Any], b: str | Sequence[Any]) -> int:
    """The number of items that both begin with, found by bisection: comparing slices is faster than comparing items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
