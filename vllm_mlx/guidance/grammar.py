"""Grammar text → a matcher over one tokenizer's vocabulary, by llguidance. Any thread may call it."""

import json
import re
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..core.errors import InvalidParameter
from ..tokens.tokenizer import Tokenizer
from .compile_thread import CompileThreads
from .compiled_grammars import CompiledGrammars

MAX_GRAMMAR_CHARS = 1 << 20
_LIMIT_S = 10  # seconds for one grammar
_MAX_COMPILING = 2  # grammars at once, as many as there are threads for prompts
_MAX_MESSAGE = 400
_MAX_ROW_ITEMS = 2000  # 450 optional properties take 1,800
_MAX_STEP_ITEMS = 20_000  # of one mask; ambiguous grammars reach it when a mask takes a tenth of a second
_EXCERPT = re.compile(r"\d+ \||\^+$")


class GrammarCompiler:
    """The vocabulary is read when the first grammar comes; compiled grammars are kept, those used last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size`: width of the logits."""
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
        """A matcher at its start: copy it. Raises InvalidParameter, naming `param`, for what is no grammar.

        `tenant`: whose grammar it is; nobody else is served faster by it.
        """
        known = self._compiled.get(tenant, grammar)
        if known is not None:
            return known
        matcher = self._new(grammar, param)
        self._compiled.add(tenant, grammar, matcher)
        with self._lock:
            self.num_compiled += 1
        return matcher

    def _new(self, grammar: str, param: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(f"`{param}` is too large: its grammar has {len(grammar)} characters.", param=param)
        vocabulary = self._read_vocabulary()
        try:
            matcher = self._threads.run(lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=_limits()))
        except TimeoutError:
            message = f"`{param}` takes more than {_LIMIT_S} s to compile as a grammar. Make it simpler."
            raise InvalidParameter(message, param=param) from None
        if matcher.is_error():
            raise InvalidParameter(f"`{param}` makes no grammar: {_reason(matcher)}", param=param)
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def _load_vocabulary(self) -> LLTokenizer:
        """Added tokens, declared special or not, are tags: free text never holds one."""
        description = json.loads(self._tokenizer.backend.to_str())
        for token in description["added_tokens"]:
            token["special"] = token["content"] in self._tokenizer.marker_tokens
        eos = sorted(self._tokenizer.eos_token_ids) or [0]
        return LLTokenizer(json.dumps(description), n_vocab=self.vocab_size, eos_token=eos)


def _reason(matcher: LLMatcher) -> str:
    """Without the excerpt of the grammar, of which the client wrote only a part."""
    lines = (line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines())
    return " ".join(line for line in lines if line and not _EXCERPT.match(line))[:_MAX_MESSAGE]


def _limits() -> LLParserLimits:
    return LLParserLimits(
        verbose_errors=False,
        max_items_in_row=_MAX_ROW_ITEMS,
        step_max_items=_MAX_STEP_ITEMS,
    )
