"""How much time of the engine thread the grammars of replies may take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import GrammarLimit

Clock = Callable[[], float]
thread_time: Clock = time.thread_time  # what the thread itself worked: a busy machine counts against nobody

TOKEN_S = 0.005  # a large vocabulary and a large schema take 0.0001 on average
START_S = 0.05  # for the first masks of a reply
GRACE_S = 1.0  # beyond that, for all replies of a tenant together
REFILL = 0.02  # of the time that passes comes back to the tenant's grace


class Grace:
    """The time that slow grammars of one tenant may take from everybody else, however many replies it asks for."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._left_s = GRACE_S
        self._seen_s = clock()

    def spend(self, seconds: float) -> bool:
        """False where it is used up. It comes back with time."""
        now_s = self._clock()
        self._left_s = min(GRACE_S, self._left_s + REFILL * (now_s - self._seen_s)) - seconds
        self._seen_s = now_s
        return self._left_s >= 0


class GrammarTime:
    """All rows wait while the grammar of one is followed, so each grammar has a share that grows with its tokens.

    What it takes beyond its share is taken from the grace of its tenant.
    """

    def __init__(self, clock: Clock, grace: Grace, param: str):
        """`param` is the field of the request that asks for the grammar."""
        self._clock = clock
        self._grace = grace
        self._param = param
        self._spent_s = 0.0
        self._excess_s = 0.0  # that the grace has paid for
        self._num_tokens = 0

    @contextmanager
    def measured(self, *, is_token: bool = False) -> Iterator[None]:
        """Raises GrammarLimit behind work that takes more than the share. `is_token`: it takes in one more token."""
        start_s = self._clock()
        yield
        self._spent_s += self._clock() - start_s
        self._num_tokens += is_token
        excess_s = self._spent_s - START_S - TOKEN_S * self._num_tokens
        if excess_s <= self._excess_s:
            return
        more_s, self._excess_s = excess_s - self._excess_s, excess_s
        if not self._grace.spend(more_s):
            raise GrammarLimit(
                f"The reply ended because its grammar (`{self._param}`) is too slow to follow: it took "
                f"{self._spent_s:.1f} s for {self._num_tokens} tokens. A reply may take {START_S:g} s and "
                f"{TOKEN_S * 1000:g} ms for each token, and all replies of one API key a further {GRACE_S:g} s, of "
                f"which {REFILL:.0%} come back each second. Use a grammar with fewer alternatives and less recursion.",
                param=self._param,
            )
