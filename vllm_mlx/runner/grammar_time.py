"""How much time of the engine thread the grammar of one reply may take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import GrammarLimit

Clock = Callable[[], float]
thread_time: Clock = time.thread_time  # what the thread itself worked: a busy machine counts against nobody

GRACE_S = 1.0
TOKEN_S = 0.005  # a large vocabulary and a large schema take 0.0001 on average


class GrammarTime:
    """All rows wait while the grammar of one is followed, so each grammar has a share that grows with its tokens."""

    def __init__(self, clock: Clock, param: str):
        """`param` is the field of the request that asks for the grammar."""
        self._clock = clock
        self._param = param
        self._spent_s = 0.0
        self._num_tokens = 0

    @contextmanager
    def measured(self, *, is_token: bool = False) -> Iterator[None]:
        """Raises GrammarLimit behind work that takes more than the share. `is_token`: it takes in one more token."""
        start_s = self._clock()
        yield
        self._spent_s += self._clock() - start_s
        self._num_tokens += is_token
        if self._spent_s > GRACE_S + TOKEN_S * self._num_tokens:
            raise GrammarLimit(
                f"The reply ended because its grammar (`{self._param}`) is too slow to follow: it took "
                f"{self._spent_s:.1f} s for {self._num_tokens} tokens, and may take {GRACE_S:g} s and "
                f"{TOKEN_S * 1000:g} ms for each token. Use a grammar with fewer alternatives and less recursion.",
                param=self._param,
            )
