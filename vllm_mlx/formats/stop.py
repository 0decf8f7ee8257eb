"""Finds the first stop string in a text that is still growing, and holds back text that may belong to one."""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from ..core.request import SamplingParams
from .tokenizer import Piece


class StopStage:
    """Passes pieces on as soon as no stop string can remove them. Feed nothing after a match."""

    def __init__(self, sampling: SamplingParams):
        """Without stop strings every piece passes immediately, as do the pieces before `min_tokens`."""
        self._min_tokens = sampling.min_tokens
        self._matcher = (
            StopMatcher(sampling.stop, include_match=sampling.include_stop_str_in_output) if sampling.stop else None
        )
        self._num_tokens = 0
        self._held: deque[Piece] = deque()
        self._num_safe_chars = 0  # characters of `_held` that no stop string can remove
        self.matched: str | None = None

    def feed(self, piece: Piece) -> list[Piece]:
        self._num_tokens += piece.num_tokens
        if self._matcher is None or self._num_tokens < self._min_tokens:
            return [piece]
        safe, self.matched = self._matcher.feed(piece.text)
        self._held.append(piece)
        self._num_safe_chars += len(safe)
        return self._release(final=self.matched is not None)

    def finish(self) -> list[Piece]:
        if self._matcher is None:
            return []
        self._num_safe_chars += len(self._matcher.finish())
        return self._release(final=True)

    def _release(self, *, final: bool) -> list[Piece]:
        """Return the safe pieces. An added token is released complete or, at the end, cut and as plain text."""
        released: list[Piece] = []
        while self._held and (self._num_safe_chars or not self._held[0].text):
            piece = self._held[0]
            if len(piece.text) > self._num_safe_chars:
                if piece.special and not final:
                    break
                safe, rest = piece.text[: self._num_safe_chars], piece.text[self._num_safe_chars :]
                self._held[0] = Piece(rest, 0)
                piece = Piece(safe, piece.num_tokens)
            else:
                self._held.popleft()
            self._num_safe_chars -= len(piece.text)
            released.append(piece)
        return released


class StopMatcher:
    """Finds the match that ends first; of two that end together, the longer one. Cuts of the text do not matter.

    The time is linear in the length of the text, for any text and any stop strings. A piece in which no stop string can
    begin or continue costs the same for any number of them.
    """

    def __init__(self, stop: Iterable[str], *, include_match: bool = False):
        self._stop = [_Search(text) for text in sorted(stop, key=len, reverse=True)]
        self._firsts = frozenset(search.stop[0] for search in self._stop)
        self._include_match = include_match
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that no stop string can remove, the matched stop string). Feed nothing after a match."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
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
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Searches one stop string by the algorithm of Knuth, Morris and Pratt.

    `num_met` is the length of the longest beginning of the stop string that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_met = 0
        self._shorter = _shorter_beginnings(stop)

    def feed(self, text: str) -> int | None:
        """Return the position in `text` at which the stop string ends, or None if it does not end there."""
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
    """For each beginning of `stop`, the length of the longest shorter beginning that it ends with."""
    lengths = [0]
    for char in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != char:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == char))
    return tuple(lengths)
