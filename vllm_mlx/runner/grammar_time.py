"""Limits the time of the engine thread that the grammars of replies take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import GrammarLimit

Clock = Callable[[], float]
thread_time: Clock = time.thread_time  # processor time of the thread, so that a busy machine counts against nobody

TOKEN_S = 0.005  # per token; a large schema over a large vocabulary takes 0.0001 s on average
START_S = 0.05  # allowance for the first masks of a reply
GRACE_S = 1.0  # beyond that, for all replies of one tenant together
REFILL = 0.02  # share of the passing time by which a tenant's grace is refilled


class Grace:
    """The extra time that slow grammars of one tenant may take, over all of its replies."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._left_s = GRACE_S
        self._seen_s = clock()

    def spend(self, seconds: float) -> bool:
        """Take time from the grace. False once it is used up; it is refilled as time passes."""
        now_s = self._clock()
        self._left_s = min(GRACE_S, self._left_s + REFILL * (now_s - self._seen_s)) - seconds
        self._seen_s = now_s
        return self._left_s >= 0


class GrammarTime:
    """The time that one reply's grammar takes.

    All rows wait while one grammar is evaluated, so each grammar has an allowance that grows with its tokens. Time
    beyond that is taken from the grace of its tenant.
    """

    def __init__(self, clock: Clock, grace: Grace, param: str):
        """`param` is the field of the request that asks for the grammar."""
        self._clock = clock
        self._grace = grace
        self._param = param
        self._spent_s = 0.0
        self._excess_s = 0.0  # time beyond the allowance, taken from the grace
        self._num_tokens = 0

    @contextmanager
    def measured(self, *, is_token: bool = False) -> Iterator[None]:
        """Measure the enclosed work. `is_token`: the work adds a token, which adds to the allowance.

        Raises GrammarLimit after the work if allowance and grace are used up.
        """
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
