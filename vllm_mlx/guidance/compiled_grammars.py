"""Compiled grammars, those of each API key for itself: how long a grammar takes tells nothing about other keys."""

import threading
from collections import Counter, OrderedDict

from llguidance import LLMatcher

MAX_GRAMMARS = 128
MAX_CHARS = 4 << 20  # of their texts; compiled they take some twelve bytes for each character


class CompiledGrammars:
    """Any thread may call it. Where room is needed, the key that holds most loses what it used longest ago."""

    def __init__(self, max_grammars: int = MAX_GRAMMARS, max_chars: int = MAX_CHARS):
        self._max_grammars = max_grammars
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()  # by tenant and text
        self._num_chars: Counter[str] = Counter()  # by tenant
        self._num_grammars: Counter[str] = Counter()

    def get(self, tenant: str, grammar: str) -> LLMatcher | None:
        with self._lock:
            if (tenant, grammar) in self._matchers:
                self._matchers.move_to_end((tenant, grammar))
            return self._matchers.get((tenant, grammar))

    def add(self, tenant: str, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            self._count((tenant, grammar), 1 - ((tenant, grammar) in self._matchers))
            self._matchers[tenant, grammar] = matcher
            while len(self._matchers) > self._max_grammars:
                self._drop(self._num_grammars)
            while self._num_chars.total() > self._max_chars:
                self._drop(self._num_chars)

    def _drop(self, held: Counter[str]) -> None:
        [(heaviest, _)] = held.most_common(1)
        oldest = next(key for key in self._matchers if key[0] == heaviest)
        del self._matchers[oldest]
        self._count(oldest, -1)

    def _count(self, key: tuple[str, str], change: int) -> None:
        tenant, grammar = key
        self._num_grammars[tenant] += change
        self._num_chars[tenant] += change * len(grammar)
        if not self._num_grammars[tenant]:
            del self._num_grammars[tenant], self._num_chars[tenant]
