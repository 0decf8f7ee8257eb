"""Keeps the names of tool calls in replies to the declared ones: nothing is masked until a call has begun.

The parser of the format says where a call begins and when its name is complete; a grammar says what may come in
between. So a token of text costs a look-up, and a token of a call as much as its parser takes.
"""

import codecs
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import InvalidParameter
from ..core.sequence import NameHold
from ..formats import CallChoice, call_format, make_call_reader
from ..formats.family import Calls, Opening, Place
from ..formats.output_parser import CallReader, UnnamedCall
from ..formats.tokenizer import Tokenizer
from .grammar_compiler import GrammarCompiler
from .grammars import CarriedNames, LarkWriter
from .grammars.names import CHOICES, SPELLED, Lead, NameWriter, Site, before_name, name_grammar

Mask = np.ndarray[Any, np.dtype[np.uint32]]
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Piece:
    """A token in the form in which the parser is fed. `text` is None if its bytes are not complete characters."""

    bytes: bytes
    text: str | None
    is_special: bool
    may_begin_tag: bool


def held_openings(format: Calls) -> tuple[Opening, ...]:
    """Return the openings behind which names are held: those whose marker is in a spelling, and headers of messages."""
    if format.reads.reasoning is not None:
        return format.reads.openings
    written = [before_name(spelling) for spelling in format.writes]
    openings = (opening for opening in format.reads.openings if not opening.is_common)
    return tuple(opening for opening in openings if any(opening.marker in text for text in written))


class CheckpointNames:
    """Makes the rules for names in the format `tools`, with one tokenizer. Reads the vocabulary once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tools: CallChoice, compiler: GrammarCompiler):
        self._tokenizer = tokenizer
        self._tools = tools
        self._compiler = compiler
        self._lock = threading.Lock()
        self._openings = held_openings(call_format(tools))
        markers = (opening.marker for opening in self._openings)
        self.plain_markers = [one for one in markers if not any(token in one for token in tokenizer.marker_tokens)]
        plain = [opening for opening in self._openings if opening.marker in self.plain_markers]
        self.is_at_start_only = all(opening.place is Place.AT_START for opening in plain)
        """Whether markers of plain text count only where a reply begins."""
        self._parser = make_call_reader(tools, (), tokenizer.marker_tokens)
        self._pieces: dict[int, Piece] = {}
        # Python waits for this thread, because no thread may end inside llguidance.
        threading.Thread(target=self._prepare, name="names", daemon=False).start()

    def _prepare(self) -> None:
        """Read the vocabulary before the first request needs it."""
        with self._lock:
            self._compiler.read_vocabulary()
            self._crossed  # noqa: B018 - a cached property

    def rule(self, names: Sequence[str], tenant: str) -> "NameRule | None":
        """Return the rule for the names in one request's replies, or None if they are free.

        They are free in a format without a marker before names, if the format cannot carry any of them, and if a
        grammar of so many long names is too large.
        """
        self._prepare()
        carried = CarriedNames(names, self._tools, self._compiler.added_tokens)
        readable = [name for name in names if name in carried]
        if not readable or not self._openings:
            return None
        writer, format = LarkWriter(self._compiler.added_tokens), call_format(self._tools)
        try:
            names_writer = NameWriter(writer, readable, format.writes, self._parser.markers)
            leads = names_writer.leads(
                self._openings, self.plain_markers, are_headers=format.reads.reasoning is not None
            )
            grammar = name_grammar(leads.values(), writer)
        except InvalidParameter:  # the budget is spent
            return None
        return NameRule(self, tuple(names), leads, self._compiler.compile_own(grammar, tenant))

    def reader(self, names: Iterable[str]) -> CallReader:
        return make_call_reader(self._tools, names, self._tokenizer.marker_tokens)

    def piece(self, token_id: int) -> Piece:
        known = self._pieces.get(token_id)
        if known is None:
            known = self._pieces[token_id] = self._read_piece(token_id)
        return known

    def _read_piece(self, token_id: int) -> Piece:
        added, written = self._tokenizer.added_token(token_id), self._tokenizer.token_bytes(token_id)
        if added is not None:
            return Piece(written, added[0], True, True)
        try:
            text = written.decode()
        except UnicodeDecodeError:
            return Piece(written, None, False, True)
        return Piece(written, text, False, self._parser.may_begin_tag(text))

    def ids(self, text: str) -> list[int] | None:
        """Return tokens that spell plain text, or None if the vocabulary cannot spell it."""
        return self._compiler.tokens.encode(text)

    def is_crossed(self, rest: str) -> bool:
        """Whether a token spells `rest`, the end of a plain marker, and text after it."""
        return rest.encode() in self._crossed

    @cached_property
    def _crossed(self) -> frozenset[bytes]:
        """The rests of plain markers that a token spells, and more."""
        rests = frozenset(marker[at:].encode() for marker in self.plain_markers for at in range(1, len(marker)))
        firsts = frozenset(rest[:1] for rest in rests)
        found = (text for text in self._compiler.tokens.tokens if text[:1] in firsts)
        return frozenset(text[:end] for text in found for end in range(1, len(text)) if text[:end] in rests)

    @cached_property
    def always(self) -> Mask:
        """The mask of all tokens that are not text: added tokens and tokens that end a turn."""
        mask = np.zeros(self._compiler.mask_words, dtype=np.uint32)
        for token_id in {*self._compiler.added_tokens.ids.values(), *self._tokenizer.eos_token_ids}:
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return mask


class NameRule:
    """The rule for the names in one request's replies. Replies share it: it has no state of a reply."""

    def __init__(self, checkpoint: CheckpointNames, names: tuple[str, ...], leads: Mapping[Site, Lead], matcher: Any):
        """`matcher`: of the grammar of `leads`."""
        self._names = names
        self._numbers = {site: number for number, site in enumerate(leads)}
        self._leads = leads
        self._matcher = matcher
        self.checkpoint = checkpoint

    def __call__(self) -> NameHold:
        return ReplyNames(self)

    def reader(self) -> CallReader:
        return self.checkpoint.reader(self._names)

    def behind(self, unnamed: UnnamedCall) -> "_Hold | None":
        """Return the hold on the name of a call that has begun, or None if the name is free."""
        marker = unnamed.opening.marker
        if unnamed.is_quoted and marker in self.checkpoint.plain_markers:
            return None
        return self._hold((marker, unnamed.is_further), unnamed.read_text())

    def spelled(self, text: str) -> "_Hold | None":
        """Return the hold while `text` may become a marker, or None if no token completes it and begins a name."""
        rests = (marker[len(text) :] for marker in self.checkpoint.plain_markers if marker.startswith(text))
        return self._hold(SPELLED, text) if any(map(self.checkpoint.is_crossed, rests)) else None

    def _hold(self, site: Site, text: str) -> "_Hold | None":
        lead = self._leads.get(site)
        ids = None if lead is None else self.checkpoint.ids(CHOICES[self._numbers[site]] + text)
        matcher = self._matcher.deep_copy()
        if lead is None or ids is None or matcher.try_consume_tokens(ids) < len(ids):
            return None
        hold = _Hold(matcher, lead.is_open)
        return None if hold.is_over else hold


class _Hold:
    """Holds the name of one call while it is written. `is_open`: the reply may also continue without a call."""

    def __init__(self, matcher: Any, is_open: bool):
        self._matcher = matcher
        self.is_open = is_open

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_error() or self._matcher.is_accepting())

    def takes(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def fill(self, mask: Mask, always: Mask) -> bool:
        """Set the bits of the tokens that may come next. Returns False if it has failed."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            return False
        if self.is_open:
            mask[: len(always)] |= always
        return bool(mask.any())


class ReplyNames:
    """Follows one reply outside of its reasoning."""

    def __init__(self, rule: NameRule):
        self._rule = rule
        self._checkpoint = rule.checkpoint
        self.reset()

    @property
    def is_bounding(self) -> bool:
        return self._hold is not None

    def reset(self) -> None:
        """Forget the reply so far: reasoning begins."""
        self._parser = self._rule.reader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_idle = False
        self._has_tags = False
        self._hold: _Hold | None = None
        self._unnamed: UnnamedCall | None = None  # the call after the last token, if it had no name yet

    def feed(self, token_id: int) -> None:
        piece = self._checkpoint.piece(token_id)
        if self._is_idle and not piece.may_begin_tag:
            self._parser.skip(piece.text or "")
            return
        if piece.is_special:
            self._has_tags = True
            self._decoder.reset()
            self._parser.feed(piece.bytes.decode(), special=True)
        else:
            self._parser.feed(self._decoder.decode(piece.bytes))
        self._is_idle = self._parser.is_idle and not self._decoder.getstate()[0]
        self._follow(token_id)

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may come next."""
        if self._hold is None or not self._hold.fill(mask, self._checkpoint.always):
            mask[:] = _ALL
            self._hold = None

    def _follow(self, token_id: int) -> None:
        unnamed = self._parser.unnamed
        if unnamed is not None and unnamed.opening.place is Place.AT_START and self._has_tags:
            unnamed = None  # a reply can continue such a header only if the prompt has begun it
        last, self._unnamed = self._unnamed, unnamed
        if unnamed is None:
            pending = "" if self._has_tags and self._checkpoint.is_at_start_only else self._parser.pending
            self._hold = self._rule.spelled(pending) if pending else None
        elif last is None or not unnamed.continues(last):
            self._hold = self._rule.behind(unnamed)
        elif self._hold is not None and (not self._hold.takes(token_id) or self._hold.is_over):
            self._hold = None
