"""Finds the first stop string in a text that is still growing."""

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """The match that ends first wins; of two that end together, the longer. So cuts cannot matter.

    It takes time with the length of the text alone, whatever text and stop strings are.
    """

    def __init__(self, stop: Iterable[str], *, include_match: bool = False):
        self._stop = [_Search(text) for text in sorted(stop, key=len, reverse=True)]
        self._include_match = include_match
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string that was met). Nothing is to be fed after a match."""
        ends = [(end, search.stop) for search in self._stop if (end := search.feed(text)) is not None]
        num_held = len(self._held)
        text = self._held + text
        if ends:
            end, stop = min(ends, key=lambda found: found[0])
            end += num_held
            self._held = ""
            return text[: end if self._include_match else end - len(stop)], stop
        safe = len(text) - max((search.num_met for search in self._stop), default=0)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class _Search:
    """For one stop string, by Knuth, Morris and Pratt. `num_met`: how much of it the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_met = 0
        self._shorter = _shorter_beginnings(stop)

    def feed(self, text: str) -> int | None:
        """Where in `text` the stop string ends; None: it is not there."""
        met = self.num_met
        at = 0 if met else text.find(self.stop[0])
        if at < 0:
            return None
        for position in range(at, len(text)):
            met = self._next(met, text[position])
            if met == len(self.stop):
                return position + 1
        self.num_met = met
        return None

    def _next(self, met: int, char: str) -> int:
        while met and self.stop[met] != char:
            met = self._shorter[met - 1]
        return met + (self.stop[met] == char)


@lru_cache(64)
def _shorter_beginnings(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`: the length of the longest shorter one that it ends with."""
    lengths = [0]
    for char in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != char:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == char))
    return tuple(lengths)
