"""Compiles grammars for one tokenizer's vocabulary with llguidance, and keeps recent grammars. Thread-safe."""

import json
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..core.errors import GrammarLimit, InvalidParameter, Overloaded
from ..formats.tokenizer import Tokenizer
from ..util.fair_queue import FairQueue
from ..util.lru import LRU
from ..util.tasks import python_process, settle
from . import trial_process as trial
from .exact_tokenizer import ExactTokenizer

MAX_GRAMMAR_CHARS = 1 << 20
_WAIT_S = 10  # seconds that a request waits for a free place to compile
_MAX_COMPILING = 2  # concurrent grammars, of different tenants: as many as threads that prepare prompts
MAX_GRAMMARS = 128
MAX_KEPT_BYTES = 32 << 20  # a grammar that takes more is compiled again for each request
MAX_BYTES = 256 << 20  # all grammars that are kept
_MAX_ITEMS = 200_000  # parser items of a mask: 450 optional properties need 150,000 with 262,144 tokens
_MAX_ODD_ITEMS = 20_000  # in other grammars, whose rows may be long: their time grows with the square
_MAX_REFUSED = 1000  # grammars that were too slow and are remembered
_BYTES_PER_CHAR = 12  # estimated memory of a grammar that is not tried first, for each character of its text
_STARTING = threading.Lock()
T = TypeVar("T")


class GrammarCompiler:
    """Reads the vocabulary with the first grammar; keeps the grammars that were used last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_bytes: int = MAX_BYTES):
        """`vocab_size`: the width of the logits. `max_bytes` limits all grammars that are kept."""
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._compiled = CompiledGrammars(max_bytes=max_bytes)
        self._refused: deque[int] = deque(maxlen=_MAX_REFUSED)  # hashes
        self._places = FairQueue(_MAX_COMPILING, per_key=1)
        self._lock = threading.Lock()
        self.num_compiled = 0

    @property
    def mask_words(self) -> int:
        return (self.vocab_size + 31) // 32

    def compile(self, grammar: str, param: str, tenant: str = "") -> LLMatcher:
        """Return a matcher at its start, of which the caller uses a copy.

        `tenant` owns the grammar: no other tenant is served faster because of it. Raises InvalidParameter or
        GrammarLimit, naming `param`, if the grammar costs too much, and Overloaded if other grammars take too long.
        """
        known = self._compiled.get((tenant, grammar))
        if known is not None:
            return known
        if hash((tenant, grammar)) in self._refused:
            why = "it was too slow to follow in an earlier reply. Make it simpler."
            raise GrammarLimit(f"The reply cannot be guided by `{param}`: {why}", param=param)
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(f"`{param}` is too large: its grammar has {len(grammar)} characters.", param=param)
        self.read_vocabulary()
        try:
            place = self._places.wait(tenant, _WAIT_S)
        except TimeoutError:
            message = f"No place was free for {_WAIT_S} s to compile `{param}` as a grammar. Send the request again."
            raise Overloaded(message, retry_after_s=_WAIT_S) from None
        try:
            num_bytes = self._trials.num_bytes(grammar, param)
            matcher = on_large_stack(lambda: self._new(grammar, starts=True))
            return self._keep(grammar, tenant, matcher, param, num_bytes)
        finally:
            place.leave()

    def compile_own(self, grammar: str, tenant: str) -> LLMatcher:
        """Return a matcher of a grammar that this server wrote itself: it is compiled here and now.

        Raises InvalidParameter if it is too large.
        """
        known = self._compiled.get((tenant, grammar))
        return known or self._keep(grammar, tenant, self._new(grammar), "tools", _BYTES_PER_CHAR * len(grammar))

    def refuse(self, grammar: str, tenant: str) -> None:
        """Refuse the grammar from now on, and drop it: a reply that was too slow has made its tables large."""
        self._compiled.pop((tenant, grammar))
        self._refused.append(hash((tenant, grammar)))

    def _keep(self, grammar: str, tenant: str, matcher: LLMatcher, param: str, num_bytes: int) -> LLMatcher:
        if matcher.is_error():  # some limits depend on the vocabulary
            why = f"`{param}` cannot be compiled to a grammar: {trial.reason(matcher)}"
            raise InvalidParameter(why, param=param)
        if num_bytes <= MAX_KEPT_BYTES:
            self._compiled.put((tenant, grammar), matcher, num_bytes)
        with self._lock:
            self.num_compiled += 1
        return matcher

    def _new(self, grammar: str, *, starts: bool = False) -> LLMatcher:
        """Compile. `starts`: compute the first mask too, which fills tables that all copies share."""
        max_items = _MAX_ITEMS if trial.is_plain(grammar) or trial.is_calls(grammar) or not starts else _MAX_ODD_ITEMS
        matcher = LLMatcher(
            self.read_vocabulary(), grammar, log_level=0, limits=trial.parser_limits(grammar, max_items)
        )
        if starts and not matcher.is_error():
            matcher.deep_copy().compute_bitmask()
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
    def _trials(self) -> "GrammarTrials":
        return GrammarTrials(self.tokens)


class CompiledGrammars(LRU[tuple[str, str], LLMatcher]):
    """Compiled grammars by tenant and text, so that compile time reveals nothing about other tenants. Thread-safe.

    To make room, the tenant that holds most loses the grammar that it used longest ago.
    """

    def __init__(self, max_grammars: int = MAX_GRAMMARS, max_bytes: int = MAX_BYTES):
        super().__init__(max_bytes, max_grammars)

    def _victim(self, spared: Container[tuple[str, str]]) -> tuple[str, str] | None:
        held = Counter[str]()
        for (tenant, _), (_, num_bytes) in self._entries.items():
            held[tenant] += 1 if self._is_full else num_bytes
        [(heaviest, _)] = held.most_common(1)
        return next((key for key in self if key[0] == heaviest and key not in spared), None)


class GrammarTrials:
    """Processes that each try one grammar at a time. A process starts when it is needed, and ends with this object.

    Thread-safe.
    """

    def __init__(self, tokens: ExactTokenizer, max_s: float = trial.MAX_S + 5):
        """Start without processes; one that has not answered after `max_s` seconds is killed."""
        added = {token_id: text.hex() for token_id, text in enumerate(tokens.tokens) if text[:1] == b"\xff"}
        self._vocabulary = json.dumps([len(tokens.tokens), added, tokens.eos_token_id])
        self._max_s = max_s
        self._numbers = count()  # of texts
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def num_bytes(self, grammar: str, param: str) -> int:
        """Return the bytes that the grammar takes.

        Raises InvalidParameter, naming `param`, if it is refused, and Overloaded if a new process does not answer.
        """
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        outcome = None if idle is None else self._ask(idle, (grammar,))
        if outcome is None:  # the process may have been killed while it was idle
            outcome = self._ask(self._start(), (self._vocabulary, grammar))
        if outcome is None:
            raise Overloaded("A process that compiles grammars has ended.", retry_after_s=_WAIT_S)
        if outcome["refused"]:
            raise InvalidParameter(f"`{param}` cannot guide a reply: {outcome['refused']}", param=param)
        return int(outcome["num_bytes"])

    def _ask(self, process: "subprocess.Popen[bytes]", texts: Iterable[str]) -> dict[str, Any] | None:
        """Return the answer to the last of the texts, or None if the process ends, or is killed at the limit."""
        assert process.stdin is not None and process.stdout is not None
        outcome: dict[str, Any] = {}
        limit = threading.Timer(self._max_s, process.kill)
        limit.daemon = True
        limit.start()
        try:
            for text in texts:
                data, number = text.encode("utf-8", "replace"), next(self._numbers)
                process.stdin.write(trial.HEADER.pack(number, len(data)) + data)
                process.stdin.flush()
            while outcome.get("number") != number:  # else it is a second answer to an earlier text
                outcome = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            process.kill()
            process.wait()
            return None
        finally:
            limit.cancel()
        with self._lock:
            self._idle.append(process)
        return outcome

    def _start(self) -> "subprocess.Popen[bytes]":
        command, environment = python_process(trial.__name__)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            close_fds=False,  # to fork this process instead takes long if it is large
        )


def on_large_stack(work: Callable[[], T]) -> T:
    """Run work that recurses deeply in a separate thread. Threads that start meanwhile also get its stack size."""
    result: Future[T] = Future()
    with _STARTING:
        usual = threading.stack_size(trial.STACK_BYTES)
        try:
            run = threading.Thread(target=settle, args=(result, work), name="grammar", daemon=False)
            run.start()  # Python must not end inside llguidance
        finally:
            threading.stack_size(usual)
    return result.result()
