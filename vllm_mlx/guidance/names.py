"""Keeps the names of tool calls in replies to the declared ones: nothing is masked until a call has begun.

The parser of the format says where a call begins and when its name is complete; a grammar says what may come in
between. So a token of text costs a look-up, and a token of a call as much as its parser takes.
"""

import codecs
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import InvalidParameter
from ..core.sequence import NameHold
from ..formats import CallChoice, call_format, make_call_reader
from ..formats.bodies import BodyContext
from ..formats.bodies.heads import Head
from ..formats.call_reader import CallReader, UnnamedCall
from ..formats.family import Opening, Place
from ..formats.tokenizer import Tokenizer
from .grammar_compiler import GrammarCompiler
from .grammars import CHOICES, LarkWriter, Lead, NameWriter, further, name_grammar

Mask = np.ndarray[Any, np.dtype[np.uint32]]
_ALL = np.uint32(0xFFFFFFFF)
_MAX_NAME = 256  # characters; longer names make long grammars, and most parsers read none


@dataclass(frozen=True, slots=True)
class Piece:
    """A token in the form in which the parser is fed. `text` is None if its bytes are not complete characters."""

    bytes: bytes
    text: str | None
    is_special: bool
    may_begin_tag: bool


class CheckpointNames:
    """Makes the rules for names in the format `tools`, with one tokenizer. Reads the vocabulary once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tools: CallChoice, compiler: GrammarCompiler):
        self._tokenizer = tokenizer
        self._tools = tools
        self._compiler = compiler
        self._lock = threading.Lock()
        openings = [opening for opening in call_format(tools).reads.openings if not opening.is_common]
        heads = [(opening, opening.new_body(BodyContext()).head()) for opening in openings]
        self._heads = [(opening, head) for opening, head in heads if head is not None]
        self._plain = make_call_reader(tools, (), tokenizer.marker_tokens)
        self._pieces: dict[int, Piece] = {}
        # Python waits for this thread, because none may end inside llguidance.
        threading.Thread(target=self._prepare, name="names", daemon=False).start()

    def _prepare(self) -> None:
        """Read the vocabulary before the first request needs it."""
        with self._lock:
            self._compiler.read_vocabulary()
            self._crossed  # noqa: B018 - a cached property

    @property
    def held(self) -> tuple[str, ...]:
        """The markers of calls whose names are held."""
        return tuple(opening.marker for opening, _ in self._heads)

    def rule(self, names: Sequence[str], tenant: str) -> "NameRule | None":
        """Return the rule for the names in one request's replies, or None if they are free.

        They are free in a format without a marker before names, and if a grammar of so many long names is too large.
        """
        self._prepare()
        readable = [name for name in names if len(name) <= _MAX_NAME]
        writer = LarkWriter(self._compiler.added_tokens)
        try:
            written = _Leads(NameWriter(writer, readable, self._plain.markers), self._heads)
            grammar = name_grammar(written.leads, writer) if written.leads else None
        except InvalidParameter:  # the budget is spent
            return None
        matcher = None if grammar is None else self._compiler.compile_own(grammar, tenant)
        return None if matcher is None else NameRule(self, tuple(names), matcher, written)

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
        return Piece(written, text, False, self._plain.may_begin_tag(text))

    def ids(self, text: str) -> list[int] | None:
        """Return tokens that spell plain text; None: the vocabulary cannot spell it."""
        return self._compiler.tokens.encode(text)

    def is_crossed(self, rest: str) -> bool:
        """Whether a token spells `rest`, the end of a plain marker, and text after it."""
        return rest.encode() in self._crossed

    @cached_property
    def _crossed(self) -> frozenset[bytes]:
        """The rests of plain markers that a token spells, and more."""
        plain = [opening.marker for opening, _ in self._heads if self._is_plain(opening.marker)]
        rests = frozenset(marker[start:].encode() for marker in plain for start in range(1, len(marker)))
        firsts = frozenset(rest[:1] for rest in rests)
        found = (text for text in self._compiler.tokens.tokens if text[:1] in firsts)
        return frozenset(text[:end] for text in found for end in range(1, len(text)) if text[:end] in rests)

    def _is_plain(self, marker: str) -> bool:
        return not any(token in marker for token in self._tokenizer.marker_tokens)

    @cached_property
    def always(self) -> Mask:
        """The mask of all tokens that are no text: added tokens and tokens that end a turn."""
        mask = np.zeros(self._compiler.mask_words, dtype=np.uint32)
        for token_id in {*self._compiler.added_tokens.ids.values(), *self._tokenizer.eos_token_ids}:
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return mask


class _Leads:
    """The leads of one request, by what they continue: a marker, a list of calls, or the beginning of a marker."""

    def __init__(self, writer: NameWriter, heads: Sequence[tuple[Opening, Head]]):
        self.leads: list[Lead] = []
        self.writer = writer.writer
        self.by_marker: dict[str, int] = {}
        self.by_head: dict[Head, int] = {}
        self.plain: tuple[str, ...] = ()
        self.spelled: int | None = None
        self.is_at_start_only = True
        rests: list[tuple[str, str]] = []
        for opening, head in heads:
            lead = writer.behind_marker(head, opening.marker) if opening.keeps_marker else writer.behind(head)
            if lead is None:
                continue
            self.by_marker[opening.marker] = self._add(lead)
            if not any(map(self.writer.is_token, self.writer.parts(opening.marker))):
                rests.append((opening.marker, lead.expression))
                self.is_at_start_only &= opening.place is Place.AT_START
            for list_head in further(head):
                if list_head not in self.by_head and (lead := writer.behind(list_head)) is not None:
                    self.by_head[list_head] = self._add(lead)
        if rests:
            self.plain = tuple(marker for marker, _ in rests)
            self.spelled = self._add(writer.spelled(rests))

    def _add(self, lead: Lead) -> int:
        if lead in self.leads:
            return self.leads.index(lead)
        self.leads.append(lead)
        return len(self.leads) - 1


class NameRule:
    """The rule for the names in one request's replies. Replies share it: it has no state of a reply."""

    def __init__(self, checkpoint: CheckpointNames, names: tuple[str, ...], matcher: Any, leads: _Leads):
        self._names = names
        self._matcher = matcher
        self._leads = leads
        self.checkpoint = checkpoint

    def __call__(self) -> NameHold:
        return ReplyNames(self)

    def reader(self) -> CallReader:
        return self.checkpoint.reader(self._names)

    @property
    def is_at_start_only(self) -> bool:
        """Whether markers of plain text count only where a reply begins."""
        return self._leads.is_at_start_only

    def behind(self, unnamed: UnnamedCall) -> "_Hold | None":
        """Return the hold on the name of a call that has begun; None: the name is free."""
        opening, head = unnamed.opening, unnamed.further_head
        if opening.is_common or (unnamed.is_quoted and opening.marker in self._leads.plain):
            return None
        leads = self._leads
        number = leads.by_marker.get(opening.marker) if head is None else leads.by_head.get(head)
        return self._hold(number, unnamed.read_text())

    def spelled(self, text: str) -> "_Hold | None":
        """Return the hold while `text` may become a marker; None: no token both completes it and begins a name."""
        rests = (marker[len(text) :] for marker in self._leads.plain if marker.startswith(text))
        return self._hold(self._leads.spelled, text) if any(map(self.checkpoint.is_crossed, rests)) else None

    def _hold(self, number: int | None, text: str) -> "_Hold | None":
        if number is None:
            return None
        ids = self.checkpoint.ids(CHOICES[number] + text)
        matcher = self._matcher.deep_copy()
        if ids is None or matcher.try_consume_tokens(ids) < len(ids):
            return None
        hold = _Hold(matcher, self._leads.leads[number].is_open)
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
        """Set the bits of the tokens that may come next. False: the grammar has failed, and `mask` is to be ignored."""
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
        self._unnamed: UnnamedCall | None = None  # the call after the last token, if it had no name then

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
            pending = "" if self._has_tags and self._rule.is_at_start_only else self._parser.pending
            self._hold = self._rule.spelled(pending) if pending else None
        elif last is None or not unnamed.continues(last):
            self._hold = self._rule.behind(unnamed)
        elif self._hold is not None and (not self._hold.takes(token_id) or self._hold.is_over):
            self._hold = None
