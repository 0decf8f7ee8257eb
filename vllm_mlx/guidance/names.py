"""Keeps the names of tool calls in replies to the declared ones: nothing is masked until a call has begun."""

import threading
from collections.abc import Sequence
from functools import cached_property

from ..core.errors import InvalidParameter
from ..core.sequence import NameHold
from ..formats import Calls
from ..formats.tokenizer import Tokenizer
from .grammar_compiler import GrammarCompiler
from .grammars import CarriedNames, LarkWriter
from .grammars.names import NamesWriter, held_openings


class CheckpointNames:
    """Makes the rules for names in the format `tools`, with one tokenizer. Reads the vocabulary once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tools: Calls, compiler: GrammarCompiler):
        self._tokenizer = tokenizer
        self._tools = tools
        self._compiler = compiler
        self._lock = threading.Lock()
        markers = (opening.marker for opening in held_openings(tools))
        self._plain_markers = [one for one in markers if not any(token in one for token in tokenizer.marker_tokens)]
        # Python waits for this thread, because no thread may end inside llguidance.
        threading.Thread(target=self._prepare, name="names", daemon=False).start()

    def _prepare(self) -> None:
        """Read the vocabulary before the first request needs it."""
        with self._lock:
            self._compiler.read_vocabulary()
            self._crossed, self._cut_ids  # noqa: B018 - cached properties

    def rule(self, names: Sequence[str], tenant: str) -> NameHold | None:
        """Return the rule for the names in one request's replies, or None if they are free.

        They are free in a format without a marker before names, if the format cannot carry any of them, and if the
        grammar of the names would be too large.
        """
        self._prepare()
        carried = CarriedNames(names, self._tools, self._tokenizer.added)
        readable = [name for name in names if name in carried]
        if not readable or not held_openings(self._tools):
            return None
        writer = LarkWriter(self._tokenizer.added)
        special_ids = {*self._tokenizer.added.ids.values(), *self._tokenizer.eos_token_ids}
        try:
            grammar = NamesWriter(writer, readable, self._tools, special_ids).grammar(self._crossed)
            return NameHold(self._compiler.compile_own(grammar, tenant), self._cut_ids)
        except InvalidParameter:
            return None

    @cached_property
    def _crossed(self) -> list[str]:
        """Return the beginnings of plain markers whose rest, and more, a token spells."""
        cuts = [(one[:at], one[at:].encode()) for one in self._plain_markers for at in range(1, len(one))]
        firsts, rests = {rest[:1] for _, rest in cuts}, {rest for _, rest in cuts}
        found = (text for text in self._compiler.tokens.tokens if text[:1] in firsts)
        spelled = {text[:end] for text in found for end in range(1, len(text)) if text[:end] in rests}
        return sorted({begun for begun, rest in cuts if rest in spelled})

    @cached_property
    def _cut_ids(self) -> frozenset[int]:
        """Return the ids of tokens whose bytes are not complete characters."""
        return frozenset(id for id, text in enumerate(self._compiler.tokens.tokens) if not _is_complete(text))


def _is_complete(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text[:1] == b"\xff"
    return True
