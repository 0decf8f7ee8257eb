"""Grammar text → a matcher over one tokenizer's vocabulary, by llguidance. Any thread may call it."""

import json
import re
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..core.errors import InvalidParameter
from .tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 20
_MAX_COMPILED = 128
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
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self.num_compiled = 0

    @property
    def mask_words(self) -> int:
        return (self.vocab_size + 31) // 32

    def compile(self, grammar: str, param: str) -> LLMatcher:
        """A matcher at its start: copy it. Raises InvalidParameter, naming `param`, for what is no grammar."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self._new(grammar, param)
        with self._lock:
            self.num_compiled += 1
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _new(self, grammar: str, param: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(f"`{param}` is too large: its grammar has {len(grammar)} characters.", param=param)
        matcher = LLMatcher(self._read_vocabulary(), grammar, log_level=0, limits=_limits())
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
