"""Compiles grammars for one tokenizer's vocabulary, by llguidance, and keeps recent ones. Thread-safe."""

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..core.errors import InvalidParameter
from ..tokens.tokenizer import Tokenizer
from .exact_tokenizer import ExactTokenizer
from .grammars import AddedTokens

MAX_GRAMMAR_CHARS = 1 << 20
_LIMIT_S = 10  # seconds to compile one grammar
_MAX_COMPILING = 2  # grammars at once: as many as threads that prepare prompts
_MAX_MESSAGE = 400
_MAX_ROW_ITEMS = 2000  # 450 optional properties need 1,800
_MAX_STEP_ITEMS = 20_000  # per mask; an ambiguous grammar reaches it when a mask takes a tenth of a second
_EXCERPT = re.compile(r"\d+ \||\^+$")
MAX_OPTIONAL = 4000  # optional pieces of one regular expression; their memory and time grow with the square of it
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/((?:\\.|[^/\\\n])+)/')  # group 1: a regular expression
_OPTIONAL = re.compile(r"[*?]|\{0?,")
MAX_GRAMMARS = 128
MAX_CHARS = 4 << 20  # characters of all grammar texts; a compiled grammar takes about twelve bytes for each character
STACK_BYTES = 512 << 20  # address space; memory is used on demand: 140 MB for 35,000 rules that refer to each other
T = TypeVar("T")


class GrammarCompiler:
    """Reads the vocabulary with the first grammar; keeps the grammars that were used last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size`: the width of the logits."""
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._compiled = CompiledGrammars()
        self._threads = CompileThreads(num_threads=_MAX_COMPILING, limit_s=_LIMIT_S)
        self._lock = threading.Lock()
        self.num_compiled = 0

    @property
    def mask_words(self) -> int:
        return (self.vocab_size + 31) // 32

    def compile(self, grammar: str, param: str, tenant: str = "") -> LLMatcher:
        """Return a matcher at its start, of which the caller uses a copy. Raises InvalidParameter, naming `param`.

        `tenant` owns the grammar: no other tenant is served faster because of it.
        """
        return self._kept(grammar, tenant, lambda: self._new(grammar, param))

    def compile_own(self, grammar: str, tenant: str) -> LLMatcher:
        """Return a matcher of a grammar that this server wrote itself: it is compiled here and now, without limits."""
        vocabulary = self.read_vocabulary()
        matcher = self._kept(grammar, tenant, lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=_limits()))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _kept(self, grammar: str, tenant: str, new: Callable[[], LLMatcher]) -> LLMatcher:
        known = self._compiled.get(tenant, grammar)
        if known is not None:
            return known
        matcher = new()
        self._compiled.add(tenant, grammar, matcher)
        with self._lock:
            self.num_compiled += 1
        return matcher

    def _new(self, grammar: str, param: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(f"`{param}` is too large: its grammar has {len(grammar)} characters.", param=param)
        if any(len(_OPTIONAL.findall(regex)) > MAX_OPTIONAL for regex in _regexes(grammar)):
            message = f"`{param}` has a regular expression with more than {MAX_OPTIONAL} optional pieces (`*`, `?`)."
            raise InvalidParameter(f"{message} Make it simpler.", param=param)
        vocabulary = self.read_vocabulary()
        try:
            matcher = self._threads.run(lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=_limits()))
        except TimeoutError:
            message = f"`{param}` takes more than {_LIMIT_S} s to compile as a grammar. Make it simpler."
            raise InvalidParameter(message, param=param) from None
        if matcher.is_error():
            raise InvalidParameter(f"`{param}` cannot be compiled to a grammar: {_reason(matcher)}", param=param)
        return matcher

    def read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                tokens = self.tokens
                self._vocabulary = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.eos_token_ids)
            return self._vocabulary

    @cached_property
    def tokens(self) -> ExactTokenizer:
        return ExactTokenizer(self._tokenizer, self.vocab_size)

    @cached_property
    def added_tokens(self) -> AddedTokens:
        known = {text: self._tokenizer.token_id(text) for text in sorted(self._tokenizer.marker_tokens)}
        return AddedTokens({text: token_id for text, token_id in known.items() if token_id is not None})


class CompiledGrammars:
    """Compiled grammars by tenant, so that compile time reveals nothing about other tenants. Thread-safe.

    To make room, the tenant that holds most loses the grammar that it used longest ago.
    """

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


class CompileThreads:
    """Threads with a large stack, for work that recurses deeply and cannot be stopped. `num_threads` run at most.

    A thread that nobody waits for any longer runs to its end, and counts until then.
    """

    def __init__(self, *, num_threads: int, limit_s: float):
        self._limit_s = limit_s
        self._free = threading.Semaphore(num_threads)
        self._starting = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` does. Raises TimeoutError after too long a wait for a thread or for the end."""
        if not self._free.acquire(timeout=self._limit_s):
            raise TimeoutError
        result: Future[T] = Future()

        def run_and_report() -> None:
            try:
                value = work()
            except BaseException as error:  # it is raised in the thread that waits for the result
                if result.set_running_or_notify_cancel():
                    result.set_exception(error)
            else:
                if result.set_running_or_notify_cancel():
                    result.set_result(value)
            finally:
                self._free.release()

        self._start(run_and_report)
        try:
            return result.result(self._limit_s)
        except TimeoutError:
            if result.cancel():  # a result that comes too late is dropped: a grammar may take a gigabyte
                raise
            return result.result()

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        """Start a thread. Threads that start meanwhile get its stack size too, which costs address space only."""
        with self._starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=target, name="grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(usual)
        return thread


def _regexes(grammar: str) -> Iterator[str]:
    """All regular expressions of the Lark texts in a grammar."""
    for part in json.loads(grammar)["grammars"]:
        yield from (found[1] for found in _LITERAL.finditer(part.get("lark_grammar", "")) if found[1])


def _reason(matcher: LLMatcher) -> str:
    """Return the error without its excerpt of the grammar, of which the client wrote only a part."""
    lines = (line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines())
    return " ".join(line for line in lines if line and not _EXCERPT.match(line))[:_MAX_MESSAGE]


def _limits() -> LLParserLimits:
    return LLParserLimits(
        verbose_errors=False,
        max_items_in_row=_MAX_ROW_ITEMS,
        step_max_items=_MAX_STEP_ITEMS,
    )
