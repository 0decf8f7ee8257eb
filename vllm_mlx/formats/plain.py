"""The parser of a model without formats: all text is content."""

from ..core.events import ContentEvent, TextDelta


class PlainParser:
    markers: frozenset[str] = frozenset()
    in_reasoning = False

    def __init__(self) -> None:
        self.text_starts: list[int] = []
        self._position = 0

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]:
        self.text_starts = [self._position] if text else []
        self._position += len(text)
        return [TextDelta(text)] if text else []

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]:
        self.text_starts = []
        return []
