"""A rendered text and its ids. Finds the ids that it shares with other texts; knows no conversation."""

from collections.abc import Sequence
from typing import Any

import tokenizers

from ..formats.tokenizer import Tokenizer, context_ids
from .remembered import Boundary, KnownPrefix

_WINDOW = 64  # tokens before a place that decide how it is tokenized, if no added token is nearer
_LOOKAHEAD = 256  # characters


class EncodedText:
    """A text and its ids: first the ids of a known prefix, if there is one, then the ids of the tokenized tail."""

    def __init__(self, tokenizer: Tokenizer, text: str, known_prefix: KnownPrefix | None = None):
        """Encode a text. The known ids are used if the rest of the text is tokenized the same without them."""
        self._tokenizer = tokenizer
        self.text = text
        rest = None if known_prefix is None else _rest(tokenizer, text, known_prefix)
        self.known_prefix = None if rest is None else known_prefix
        # The tail begins at character `_start`; its first token may be the last one of the known prefix.
        self._start, self._encoding = rest or (0, tokenizer.encoding(text))
        self._ids: list[int] = self._encoding.ids
        self._num_before = 0
        before: list[int] = []
        if self.known_prefix is not None:
            self._num_before = self.known_prefix.num_tokens - (self._start < self.known_prefix.num_chars)
            before = self.known_prefix.entry.token_ids(self._num_before)
        self.token_ids = (*before, *self._ids)

    def common_with(self, other: str) -> Boundary:
        """Return the end of the longest run of ids with which this text and `other` both begin."""
        end = common_prefix(self.text, other)
        if end == len(self.text) == len(other):
            return Boundary(end, len(self.token_ids))
        if self.known_prefix is not None and end <= self.known_prefix.num_chars:
            return self.boundary_before(end)
        start = self._window(end)
        mine, theirs = (self._tokenizer.encoding(text[start : end + _LOOKAHEAD]) for text in (self.text, other))
        num_common = common_prefix(mine.ids, theirs.ids)
        return self.boundary_before(start + _clean_end(mine, num_common))

    def before_space(self, boundary: Boundary) -> Boundary:
        """Return the last boundary at or before this one without white space before it.

        White space there would merge into one token with white space that another text has after the boundary.
        """
        end = boundary.num_chars
        while end and self.text[end - 1].isspace():
            while end and self.text[end - 1].isspace():
                end -= 1
            boundary = self.boundary_before(end)
            end = boundary.num_chars
        return boundary

    def boundary_before(self, end: int) -> Boundary:
        """Return the last boundary between tokens at or before character `end`."""
        if self.known_prefix is not None and end <= self.known_prefix.num_chars:
            return self._known_boundary(end)
        index = self._token_at(end - 1)
        if index is None:
            return self._known_boundary(end)
        while (
            index < len(self._ids) and (span := self._encoding.token_to_chars(index)) and self._start + span[1] <= end
        ):
            index += 1
        span = self._encoding.token_to_chars(index - 1) if index else None
        if span is None:
            return self._known_boundary(end)
        return Boundary(self._start + span[1], self._num_before + index)

    def _known_boundary(self, end: int) -> Boundary:
        return Boundary(0, 0) if self.known_prefix is None else self.known_prefix.entry.boundary_before(end)

    def _window(self, end: int) -> int:
        """Return the character to tokenize from, so that the ids around `end` are those of the complete text."""
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

    def _token_at(self, position: int) -> int | None:
        """Return the index in the tail of the token that holds a character, or else of the nearest token before it."""
        for char in range(position - self._start, max(-1, position - self._start - _WINDOW), -1):
            index = self._encoding.char_to_token(char)
            if index is not None:
                return int(index)
        return None


def _rest(tokenizer: Tokenizer, text: str, known_prefix: KnownPrefix) -> tuple[int, tokenizers.Encoding] | None:
    """Return the start of a text's tail, and its encoding, or None if other ids follow the known prefix."""
    added = tokenizer.added_token(known_prefix.last_id)
    if added is not None and text.endswith(added[0], 0, known_prefix.num_chars):
        start = known_prefix.num_chars - len(added[0])
        encoding = tokenizer.encoding(text[start:])
        if encoding.ids[:1] == [known_prefix.last_id]:
            return start, encoding
    tail = text[known_prefix.num_chars :]
    encoding = tokenizer.encoding(tail)
    return (known_prefix.num_chars, encoding) if _continues(tokenizer, known_prefix, encoding.ids, tail) else None


def common_prefix(a: str | Sequence[Any], b: str | Sequence[Any]) -> int:
    """Return the number of items that both begin with. Bisection compares slices, which is faster than items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _continues(tokenizer: Tokenizer, known_prefix: KnownPrefix, token_ids: list[int], rest: str) -> bool:
    """Return whether these ids of `rest`, tokenized alone, also decode to `rest` after the known prefix.

    They always do if they begin with an added token. Some tokenizers put a space before any other text.
    """
    if not token_ids or tokenizer.added_token(token_ids[0]) is not None:
        return True
    context = context_ids(tokenizer, [known_prefix.last_id])
    return tokenizer.decode([*context, *token_ids])[len(tokenizer.decode(context)) :] == rest


def _clean_end(encoding: tokenizers.Encoding, num_tokens: int) -> int:
    """Characters of the first `num_tokens`, without a character whose bytes reach into the next token."""
    for index in range(num_tokens, 0, -1):
        before, after = encoding.token_to_chars(index - 1), encoding.token_to_chars(index)
        if before is not None and (after is None or before[1] <= after[0]):
            return before[1]
    return 0
