"""What every output parser is: pieces of text in, content events out."""

from typing import Protocol

from ..core.events import ContentEvent


class OutputParser(Protocol):
    """`feed` every piece, then `finish` once. The events never depend on where the text was cut.

    `special`: the piece is the whole text of one added token of the tokenizer. `is_end`: the model ended its turn, so
    an open call is closed, its arguments made one JSON object. Else a limit cut the reply, and the call stays open.
    """

    text_starts: list[int]
    """Of the last call, for each TextDelta: where its text begins, counted in characters fed since the start."""

    @property
    def markers(self) -> frozenset[str]:
        """The tags this parser may consume."""
        ...

    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]: ...

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]: ...
