"""Writes calls up to their names, by the spellings in the families' table. What follows a name is free."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...formats.bodies.body import FUNCTION_PREFIX
from ...formats.bodies.message_header import READERS
from ...formats.family import CallKind, JsonCall, NamedCall, Opening, Spelling, call_frame
from .guide_grammar import grammars
from .lark import TEXT, LarkWriter, either, literal, quoted_regex

_NAME_ENDS = " \t\r\n<>[](){}\"'`,;="  # a name without quotes does not contain them
CHOICES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPACES = r"[ \t\r\n]"
_MAX_SPACES = 16  # a weak model would write them for ever
_WHITE = rf"/{_SPACES}{{1,{_MAX_SPACES}}}/"
_NEVER = r"\x00"
_NAME_KEYS = ("name", "tool_name")  # that the JSON body reads
_MAX_MEMBERS = 8  # members of an object before its name
_RECIPIENT = "to="
Site = tuple[str, bool]  # the marker of a call, and whether another call precedes this one in the same tags
SPELLED: Site = ("", False)  # inside a marker of plain text


@dataclass(frozen=True, slots=True)
class Lead:
    """The text from where a name is held up to its end: after a marker, after a call of a list, or in a plain marker.

    `is_open`: text that is not a call may follow instead.
    """

    expression: str
    is_open: bool = False


def before_name(spelling: Spelling) -> str:
    """Return the text of a first call up to its name, or up to the object that contains its name."""
    return spelling.begin + spelling.open + _own_start(spelling.kind)


def name_grammar(leads: Collection[Lead], writer: LarkWriter) -> str:
    """Write one grammar for all leads. A character of `CHOICES` chooses one: a matcher reads that character first."""
    assert len(leads) <= len(CHOICES), "a format has few leads"
    options = (f"{literal(choice)} {lead.expression}" for choice, lead in zip(CHOICES, leads, strict=False))
    return grammars(writer.build(either(options)))


class NameWriter:
    """Writes leads. `names`: at least one; `tags`: the texts that the format's parser reads as tags."""

    def __init__(self, writer: LarkWriter, names: Sequence[str], spellings: Sequence[Spelling], tags: Iterable[str]):
        self._writer = writer
        self._names = names
        self._spellings = spellings
        self._tags = tuple(tag for tag in dict.fromkeys(tags) if writer.is_token(tag))

    def leads(self, openings: Iterable[Opening], plain: Sequence[str], *, are_headers: bool) -> dict[Site, Lead]:
        """Return the lead of each site. `plain`: the markers without a token. `are_headers`: markers begin messages."""
        leads: dict[Site, Lead] = {}
        for marker in (opening.marker for opening in openings):
            leads[marker, False] = self._recipient(marker) if are_headers else self._first(marker)
            if not are_headers:
                leads[marker, True] = self._further(marker)
        if plain:
            leads[SPELLED] = self._spelled([(marker, leads[marker, False]) for marker in plain])
        return leads

    def _first(self, marker: str) -> Lead:
        """Return the lead after the marker of a call."""
        options = (self._call(one, before_name(one).partition(marker)[2], marker) for one in self._having(marker))
        return Lead(either(options))

    def _further(self, marker: str) -> Lead:
        """Return the lead after a call in the same tags. Text that does not begin like a call is free."""
        options, beginnings = [], []
        for one in self._having(marker):
            own = one.open.rpartition(marker)[2] + _own_start(one.kind)
            call = self._call(one, own, marker)
            beginnings.append(_beginning(one.kind, own))
            if one.between.strip():
                beginnings.append("[,;]")
                call = f"({self._white} {self._writer.terminal('/[,;]/')})? {call}"
            options.append(call)
        plain = self._unfinished(rf"{_SPACES}*({'|'.join(dict.fromkeys(beginnings))})(?s:.*)")
        return Lead(either([*options, plain]), is_open=True)

    def _recipient(self, marker: str) -> Lead:
        """Return the lead after the marker of a message. If its header names a recipient, that is held."""
        name = self._name([FUNCTION_PREFIX, ""], " \t\r\n<", others=sorted(READERS))
        if marker == _RECIPIENT:
            return Lead(name)
        without = f"(?s:.*){_RECIPIENT}(?s:.*)"
        tags = either(map(self._writer.text, self._tags)) if self._tags else ""
        before = f"(({self._text(without)})? {tags})*" if tags else ""
        lead = self._writer.terminal(f"(/(?s:.*)/ & ~/{without}/) {literal(_RECIPIENT)}")
        return Lead(f"{before} ({lead} {name} | {self._unfinished(without)})", is_open=True)

    def _spelled(self, rests: Sequence[tuple[str, Lead]]) -> Lead:
        """Return the lead after the beginning of a plain marker. `rests`: each plain marker, and the lead after it."""
        lazy = (self._writer.rule(f"/(?s:.*)/ {literal(marker)}", "[lazy]") for marker, _ in rests)
        options = (f"{before} {lead.expression}" for before, (_, lead) in zip(lazy, rests, strict=True))
        return Lead(either(options), is_open=True)

    # Parts

    def _having(self, marker: str) -> Iterator[Spelling]:
        return (one for one in self._spellings if marker in before_name(one))

    def _call(self, spelling: Spelling, text: str, marker: str) -> str:
        """Return an expression for `text`, which follows the marker, and the name. White space may differ."""
        kind, writer = spelling.kind, self._writer
        before = " ".join(self._loose(part) for part in writer.parts(text.removesuffix(FUNCTION_PREFIX)))
        if isinstance(kind, JsonCall):
            return f"{before} {self._json(kind)}"
        if not (text or marker).endswith(("=", '"')):
            before = f"{before} {self._white}"
        if isinstance(kind, NamedCall):
            return f"{before} {self._name([FUNCTION_PREFIX, ''], _NAME_ENDS, is_numbered=kind.is_numbered)}".strip()
        behind = call_frame(kind, "").behind.strip()
        if not behind:
            return f"{before} {self._name([''], _NAME_ENDS)}"
        white = self._white if behind[0] == ">" else ""
        return f"{before} {self._any_of(self._framed(kind))} {white} {literal(behind[0])} {self._rest}".strip()

    def _framed(self, kind: CallKind) -> Iterator[str]:
        return (call_frame(kind, name).name for name in self._names)

    def _loose(self, part: str) -> str:
        """Return a token, or plain text with the white space before it: free text may begin in the same way."""
        if self._writer.is_token(part):
            return f"{self._white} {self._writer.text(part)}"
        if not part.strip():
            return ""
        words = rf"{_SPACES}{{1,{_MAX_SPACES}}}".join(map(quoted_regex, part.split()))
        pattern = f"/{_SPACES}{{0,{_MAX_SPACES}}}{words}/"
        return f"({self._writer.terminal(pattern)})?" if part.strip() == "[" else self._writer.terminal(pattern)

    @property
    def _white(self) -> str:
        return f"({self._writer.terminal(_WHITE)})?"

    @property
    def _rest(self) -> str:
        return f"({self._writer.terminal(TEXT)})?"

    def _any_of(self, texts: Iterable[str]) -> str:
        """Return one lexeme for all texts: as many lexemes would exceed the limit of parser items."""
        return self._writer.terminal(either(map(literal, texts)))

    def _json(self, kind: JsonCall) -> str:
        """Return the beginning of an object, with the name as its first key or behind other members."""
        texts = [prefix + name for name in self._names for prefix in ((FUNCTION_PREFIX, "") if kind.name else ("",))]
        name = self._any_of(form for text in texts for form in (json.dumps(text), json.dumps(text, ensure_ascii=False)))
        white, writer = self._white, self._writer
        if not kind.name:
            return f'{white} "{{" {white} {name} {white} ":" {self._rest}'
        other = writer.terminal(rf'/"[^"\\\x00-\x1F]{{0,64}}"/ & ~/"({"|".join(_NAME_KEYS)})"/')
        value = writer.json({}, whitespace_flexible=True)
        member = writer.rule(f'{other} {white} ":" {white} {value} {white} "," {white}')
        key = either(literal(f'"{key}"') for key in _NAME_KEYS)
        return f'{white} "{{" {white} {member}{{0,{_MAX_MEMBERS}}} {key} {white} ":" {white} {name} {self._rest}'

    def _name(
        self, prefixes: Sequence[str], ends: str, *, is_numbered: bool = False, others: Sequence[str] = ()
    ) -> str:
        """Return a name without quotes, and what ends it: one of the characters `ends`, or a tag."""
        name = self._any_of([*(prefix + name for name in self._names for prefix in prefixes), *others])
        number = f'(":" {self._writer.terminal("/[0-9]{1,4}/")})?' if is_numbered else ""
        end = [self._writer.terminal(rf"/[{quoted_class(ends)}](?s:.*)/"), *map(self._writer.text, self._tags)]
        return f"{name} {number} {either(end)}"

    def _unfinished(self, without: str) -> str:
        """Return text that does not match `without`. It never ends, because only a name completes a lead."""
        return f"{self._text(without)} {self._writer.terminal(f'/{_NEVER}/')}"

    def _text(self, without: str) -> str:
        return self._writer.terminal(rf"/[^{_NEVER}]+/ & ~/{without}/")


def _own_start(kind: CallKind) -> str:
    """Return the text that the call itself begins with. An object is left out, because its members may vary."""
    return "" if isinstance(kind, JsonCall) else call_frame(kind, "").before


def _beginning(kind: CallKind, own: str) -> str:
    """Return a regular expression for the beginning of a call."""
    if isinstance(kind, JsonCall):
        return r"\{"
    return quoted_regex(own.split()[0]) if own.strip() else r"[\w]"


def quoted_class(chars: str) -> str:
    return "".join(quoted_regex(char) if char in "\n\t\r" or not char.isalnum() else char for char in chars)
