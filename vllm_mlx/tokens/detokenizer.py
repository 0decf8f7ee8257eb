"""Ids in, text out, as soon as the text is certain. Knows no stop strings and no formats."""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # how a decoder writes bytes that are no whole character
_MAX_CONTEXT = 8
_MAX_PENDING = 16  # tokens that no character needs: what is held by then is no text


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    num_tokens: int
    special: bool = False  # the whole text of one added token
    control: bool = False  # which the tokenizer calls no part of any text


class Detokenizer:
    """The text of all pieces is the decoded reply, its first space included: the end of the prompt is its context.

    A character whose bytes are not complete is held back. No id ever raises.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._context: list[int] = []
        self._set_context(context_ids(tokenizer, prompt_token_ids))
        self._pending: list[int] = []

    def feed(self, token_id: int) -> list[Piece]:
        added = self._tokenizer.added_token(token_id)
        if added is not None:
            pieces = self.finish()
            self._set_context([token_id])
            text, control = added
            return [*pieces, Piece(text, 1, special=True, control=control)]
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if len(text) > self._context_length and (text[-1] != _UNFINISHED or len(self._pending) >= _MAX_PENDING):
            return [self._emit(text)]
        return []

    def finish(self) -> list[Piece]:
        """Everything held back, unfinished characters as replacement characters."""
        if not self._pending:
            return []
        return [self._emit(self._decode(self._context + self._pending))]

    def _emit(self, text: str) -> Piece:
        piece = Piece(text[self._context_length :], len(self._pending))
        if piece.text:
            self._set_context(self._pending)
        self._pending = []
        return piece

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_length = len(self._decode(token_ids))


def context_ids(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The shortest end of the prompt that is whole characters."""
    for length in range(1, min(_MAX_CONTEXT, len(prompt_token_ids)) + 1):
        token_ids = list(prompt_token_ids[-length:])
        text = tokenizer.decode(token_ids)
        if text and text[-1] != _UNFINISHED:
            return token_ids
    return []
