"""Constrains one reply, and limits the time that its grammar takes. It takes token ids, makes masks, and knows no mlx.

A reply reasons, is made to stop its reasoning, or is in its grammar.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import numpy as np

from ..core.errors import GenerationError, GrammarLimit
from ..core.sequence import Constraint, ReasoningRule, Sequence, Tag, TagWatch

Mask = np.ndarray[Any, np.dtype[np.uint32]]  # (words,); bit i of word w is token 32 w + i
_ALL = np.uint32(0xFFFFFFFF)
_WRONG_TOKEN = "doesn't satisfy the grammar"  # llguidance's words for a mistake of ours; other errors are limits
_TAIL = 64  # tokens; more than any end

Clock = Callable[[], float]
thread_time: Clock = time.thread_time  # processor time of the thread, which does not depend on how busy the machine is

TOKEN_S = 0.005  # per token; a large schema over a large vocabulary takes 0.0001 s on average
START_S = 0.5  # allowance for the first masks of a reply, and for a slow one


class GrammarTime:
    """The time that one reply's grammar takes.

    All rows wait while one grammar is evaluated, so each grammar has an allowance that grows with its tokens.
    """

    def __init__(self, clock: Clock, param: str):
        """`param` is the field of the request that asks for the grammar."""
        self._clock = clock
        self._param = param
        self._spent_s = 0.0
        self._ahead_s = 0.0  # for drafts
        self._num_tokens = 0

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Measure work on drafts, which may be rejected: it never ends a reply."""
        start_s = self._clock()
        yield
        self._ahead_s += self._clock() - start_s

    @property
    def may_look_ahead(self) -> bool:
        """Return whether drafts have taken less than half of a reply's allowance."""
        return self._ahead_s < (START_S + TOKEN_S * self._num_tokens) / 2

    @contextmanager
    def measured(self, *, is_token: bool = False) -> Iterator[None]:
        """Measure the enclosed work. `is_token`: the work adds a token, which adds to the allowance.

        Raises GrammarLimit after the work if the allowance is used up.
        """
        start_s = self._clock()
        yield
        self._spent_s += self._clock() - start_s
        self._num_tokens += is_token
        if self._spent_s > START_S + TOKEN_S * self._num_tokens:
            raise GrammarLimit(
                f"The reply ended because its grammar (`{self._param}`) is too slow to follow: it took "
                f"{self._spent_s:.1f} s for {self._num_tokens} tokens. A reply may take {START_S:g} s and "
                f"{TOKEN_S * 1000:g} ms for each token. Use a grammar with fewer alternatives and less recursion.",
                param=self._param,
            )


class Phase(Enum):
    """The part that bounds the next token of a reply."""

    OPENING = auto()  # the grammar's first tokens, or the opening tag of reasoning
    REASONING = auto()
    CLOSING = auto()  # the budget is spent: the end is written for the model
    LAYOUT = auto()  # like BOUND, except that a line break may follow the reasoning
    BOUND = auto()
    FREE = auto()


Filled = tuple[Phase, int]  # the phase for which the first places of a block are masked, and their number


class RowConstraint:
    """Constrains one reply. It can be rebuilt from its sequence at any time: it feeds the known tokens first."""

    def __init__(self, constraint: Constraint, seq: Sequence, clock: Clock = thread_time):
        """`clock` measures the grammar's time."""
        self.constraint = constraint
        self._time = GrammarTime(clock, constraint.param)
        self._rule = constraint.reasoning
        self._matcher = self._new_matcher()
        self._names = constraint.names
        self._begin_text()
        self._stop_ids = seq.stop_token_ids
        self._watch: TagWatch | None = None if self._rule is None else self._rule.new_watch()
        self._starts: list[tuple[int, ...]] = []  # the rest of the opening tags that the reply may still spell
        self._is_text = True  # the grammar accepts all tokens so far, which may also be an opening tag of reasoning
        self._num_reasoning = 0
        self._forced: deque[int] = deque()
        self._tail: deque[int] = deque(maxlen=_TAIL)  # the last tokens of the reasoning
        self._has_ended = False
        self._was_forced = False  # the last mask of the grammar allowed one token
        self._phase = Phase.FREE
        self._begin()
        for token_id in seq.output_token_ids:
            self.feed(token_id)

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words of a mask over the vocabulary."""
        return self.constraint.mask_words

    @property
    def is_bounding(self) -> bool:
        """Return whether a mask restricts the next token."""
        if self._has_ended or self._phase is Phase.FREE:
            return self._holds_name and not self._has_ended
        return self._phase is not Phase.REASONING or self._matcher is not None

    def feed(self, token_id: int) -> None:
        """Take in the reply's next token. Raises GrammarLimit if the grammar takes too long."""
        if self._has_ended:
            return
        self._has_ended = token_id in self._stop_ids
        match self._phase:
            case Phase.OPENING:
                self._feed_opening(token_id)
            case Phase.REASONING:
                self._feed_reasoning(token_id)
            case Phase.CLOSING:
                self._feed_closing()
            case Phase.LAYOUT:
                self._phase = Phase.BOUND
                if self._accepts(token_id) or token_id not in self._reasoning_rule.layout:
                    self._consume(token_id)
            case Phase.BOUND:
                self._consume(token_id)
            case Phase.FREE:
                self._feed_free(token_id)

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may come next. Raises GenerationError if there are none."""
        match self._phase:
            case Phase.CLOSING:
                mask[:] = 0
                _set(mask, (self._forced[0],))
            case Phase.REASONING:
                mask[:] = _ALL
                _clear(mask, (*self._stop_ids, *self.constraint.barred))
            case Phase.OPENING:
                if self._is_text:
                    self._fill_grammar(mask)
                else:
                    mask[:] = 0
                _set(mask, [start[0] for start in self._starts])
            case Phase.LAYOUT:
                self._fill_grammar(mask)
                _set(mask, self._reasoning_rule.layout)
            case Phase.FREE:
                self._fill_names(mask)
            case _:
                self._fill_grammar(mask)

    def fill_block(self, masks: Mask, drafts: Rows[int]) -> Filled:
        """Set the bits of the tokens that may come at each place, `masks: (1 + drafts, words)`, if the drafts come.

        Returns the phase, and the number of first places that are masked for it; a mask changes with the phase. The
        other places allow every token.
        """
        self.fill(masks[0])
        match self._phase:
            case Phase.REASONING:
                masks[1:] = masks[0]
                return self._phase, len(masks)
            case Phase.CLOSING:
                return self._phase, 1 + self._fill_closing(masks, drafts)
            case Phase.BOUND if self._time.may_look_ahead:
                with self._time.ahead():
                    return self._phase, 1 + self._fill_drafts(masks, drafts)
        return self._phase, 1

    def _fill_closing(self, masks: Mask, drafts: Rows[int]) -> int:
        """Mask the places behind drafts that are the forced end, and return their number."""
        forced = tuple(self._forced)
        num_right = 0
        while num_right < min(len(drafts), len(forced) - 1) and drafts[num_right] == forced[num_right]:
            num_right += 1
            masks[num_right] = 0
            _set(masks[num_right], (forced[num_right],))
        return num_right

    def _fill_drafts(self, masks: Mask, drafts: Rows[int]) -> int:
        """Mask the places behind drafts that the grammar allows, and return their number."""
        num_fed, matcher = 0, self._matcher
        try:
            for token_id in drafts:
                if token_id in self._stop_ids or not matcher.validate_tokens([token_id]):
                    break
                matcher.consume_token(token_id)
                num_fed += 1
                matcher.unsafe_compute_mask_ptr(masks[num_fed].ctypes.data, masks[num_fed].nbytes)
        finally:
            matcher.rollback(num_fed)
        return num_fed

    def has_masked(self, filled: Filled | None, place: int) -> bool:
        """Return whether a place of the last block has the mask that the reply asks for. `filled`: of `fill_block`."""
        if filled is not None and place < filled[1]:
            return self._phase is filled[0]
        return not self.is_bounding

    def forced(self) -> tuple[int, ...]:
        """Return the next tokens while only one is allowed. A grammar is asked only if its last mask allowed one."""
        if self._phase is Phase.CLOSING:
            return tuple(self._forced)
        if self._phase is not Phase.BOUND or self._has_ended or not self._was_forced:
            return ()
        with self._time.ahead():
            return tuple(self._matcher.compute_ff_tokens())

    # Phases

    @property
    def _reasoning_rule(self) -> ReasoningRule:
        assert self._rule is not None
        return self._rule

    def _begin(self) -> None:
        rule = self._rule
        if rule is not None and rule.is_open:
            self._open_reasoning(rule.prompt_reasoning)
        elif self._matcher is not None:
            self._starts = list(rule.starts) if rule is not None and rule.may_open else []
            self._phase = Phase.OPENING if self._starts else Phase.BOUND

    def _open_reasoning(self, prompt_reasoning: tuple[int, ...] = ()) -> None:
        self._phase = Phase.REASONING
        self._begin_text()
        self._num_reasoning = len(prompt_reasoning)
        self._tail.clear()
        self._tail.extend(prompt_reasoning[-_TAIL:])
        self._check_budget()

    def _feed_free(self, token_id: int) -> None:
        if self._watch is not None and self._watch.feed(token_id) is Tag.START:
            self._open_reasoning()
        elif self._names is not None:
            self._follow_calls(token_id, self._names.cut_ids)

    def _feed_opening(self, token_id: int) -> None:
        self._starts = [start[1:] for start in self._starts if start[0] == token_id]
        if any(not start for start in self._starts):
            self._matcher = self._new_matcher()
            self._open_reasoning()
            return
        if self._is_text and (not self._starts or self._accepts(token_id)):
            self._consume(token_id)
        else:
            self._is_text = False
        if not self._starts:
            self._phase = Phase.BOUND

    def _feed_reasoning(self, token_id: int) -> None:
        assert self._watch is not None
        self._num_reasoning += 1
        self._tail.append(token_id)
        match self._watch.feed(token_id):
            case Tag.END:
                leftover = self._watch.leftover if self._bounds_answer else ()
                self._end_reasoning()
                for left in leftover:
                    self.feed(left)
            case Tag.CALL:
                self._end_reasoning()
                if self._bounds_answer:
                    self.feed(token_id)
            case _:
                self._check_budget()

    @property
    def _bounds_answer(self) -> bool:
        return self._matcher is not None or self._names is not None

    def _check_budget(self) -> None:
        """Force the end once the budget is spent; if the model has begun the end itself, force the rest of it."""
        rule = self._reasoning_rule
        if rule.budget is None or self._num_reasoning < rule.budget:
            return
        tail, end = tuple(self._tail), rule.end
        longest = min(len(tail), len(end) - 1)
        done = next((count for count in range(longest, 0, -1) if tail[-count:] == end[:count]), 0)
        self._forced = deque(end[done:])
        self._phase = Phase.CLOSING

    def _feed_closing(self) -> None:
        self._forced.popleft()
        if not self._forced:
            self._end_reasoning()

    def _end_reasoning(self) -> None:
        self._watch = self._reasoning_rule.new_watch() if self._matcher is None else self._watch
        layout = self._reasoning_rule.layout
        self._phase = Phase.FREE if self._matcher is None else Phase.LAYOUT if layout else Phase.BOUND

    # The names of calls

    def _begin_text(self) -> None:
        """Begin the grammar of calls: the next token is text, without an open call."""
        self._calls: Any = None if self._names is None else self._names.matcher.deep_copy()
        self._holds_name = False

    def _follow_calls(self, token_id: int, cut_ids: Container[int]) -> None:
        """Feed the grammar of calls. A token that it refuses, as in broken arguments, ends the open call."""
        if not self._calls.consume_token(token_id):
            self._begin_text()
            self._calls.try_consume_tokens([token_id])
        is_free = self._calls.is_accepting() or (token_id in cut_ids and not self._holds_name)
        self._holds_name = not is_free

    def _fill_names(self, mask: Mask) -> None:
        self._calls.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._calls.is_error() or not mask.any():
            mask[:] = _ALL
            self._begin_text()

    # The grammar

    def _new_matcher(self) -> Any:
        matcher = self.constraint.matcher
        return None if matcher is None else matcher.deep_copy()

    def _accepts(self, token_id: int) -> bool:
        with self._time.measured():
            return bool(self._matcher.validate_tokens([token_id]))

    def _consume(self, token_id: int) -> None:
        """Feed the grammar. A matcher that rejects the token reports that when the next mask is computed."""
        with self._time.measured(is_token=True):
            self._matcher.consume_token(token_id)

    def _fill_grammar(self, mask: Mask) -> None:
        matcher = self._matcher
        if not matcher.is_error():
            with self._time.measured():
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._was_forced = int(np.bitwise_count(mask).sum()) == 1
        if matcher.is_error():
            message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
            message = f"The reply cannot be guided any further: {message}"
            if _WRONG_TOKEN in message:
                raise GenerationError(message)
            raise GrammarLimit(message, param=self.constraint.param)


def _set(mask: Mask, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear(mask: Mask, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if token_id >> 5 < len(mask):
            mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
