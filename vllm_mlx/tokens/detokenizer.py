"""Token ids in, text out, as soon as the text is certain. Knows no stop strings and no formats."""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # a decoder writes it for bytes that are no complete character
_MAX_CONTEXT = 8
_MAX_PENDING = 16  # no character needs so many tokens: bytes that are held back by then are no text


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply's text, and the number of its tokens."""

    text: str
    num_tokens: int
    special: bool = False  # it is the complete text of one added token
    control: bool = False  # that token is not part of any text, as the tokenizer declares it


class Detokenizer:
    """Joined, the texts of all pieces are the decoded reply. A character is held back until its bytes are complete.

    The end of the prompt is decoded along, so that a space at the start of the reply is kept. No id raises an error.
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
        """All that was held back; incomplete characters become replacement characters."""
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
    """The shortest end of the prompt, of at most `_MAX_CONTEXT` ids, whose text ends with a complete character."""
    for length in range(1, min(_MAX_CONTEXT, len(prompt_token_ids)) + 1):
        token_ids = list(prompt_token_ids[-length:])
        text = tokenizer.decode(token_ids)
        if text and text[-1] != _UNFINISHED:
            return token_ids
    return []
