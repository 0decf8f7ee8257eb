"""Finds the first stop string in a text that is still growing."""

from collections.abc import Iterable


class StopMatcher:
    """The match that ends first wins; of two that end together, the longer. So cuts cannot matter."""

    def __init__(self, stop: Iterable[str], *, include_match: bool = False):
        self._stop = sorted(stop, key=len, reverse=True)
        self._include_match = include_match
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string that was met). Nothing is to be fed after a match."""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            end, start, stop = min(ends)
            self._held = ""
            return text[: end if self._include_match else start], stop
        safe = len(text) - self._num_held(text)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
