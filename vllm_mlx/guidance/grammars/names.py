"""Writes the grammar of replies whose calls name declared tools, by the spellings in the families' table.

Text outside of markers and of calls up to their names is free: the grammar accepts a reply that is cut there.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from ...formats.bodies.body import FUNCTION_PREFIX
from ...formats.bodies.json_body import NAME_KEYS
from ...formats.bodies.message_header import HEADER_TAGS, READERS
from ...formats.family import Calls, ExpressionCall, JsonCall, NamedCall, Opening, Spelling, XmlCall, call_frame
from .guide_grammar import grammars
from .lark import TEXT, LarkWriter, either, literal, quoted_regex

_NAME_END = r"""/[ \t\r\n<>\[\](){}"'`,;=]/"""  # a name without quotes does not contain them
_SPACES = r"[ \t\r\n]"
_MAX_SPACES = 16  # a weak model would write them without end
_WHITE = rf"/{_SPACES}{{1,{_MAX_SPACES}}}/"
_MAX_MEMBERS = 8  # members of an object before its name
_RECIPIENT = "to="
# Text in which a tag of plain text that follows is not quoted
_FENCE = r"[ \t]*(```|~~~)[^\n]*"
_LINE = rf"(/[^\n]*/ & ~/{_FENCE}/)"
_UNQUOTED = rf"""({_LINE} "\n" | /{_FENCE}\n/ ({_LINE} "\n")* /{_FENCE}\n/)*"""
_UNQUOTED += rf""" (/{_FENCE}|([^`\n]*`[^`\n]*`)*[^`\n]*/ & ~/([^\n]*[^\w\n])?["'“‘«‹]/)"""
_CUT_ESCAPE = r"\\?"
# Arguments, by their brackets and strings alone, and the beginning of such arguments
_ARGUMENTS = """
item: string | OTHER | "{" item* "}" | "[" item* "]" | "(" item* ")"
cut: (item | "{" | "[" | "(")* cut_string?
"""


def held_openings(format: Calls) -> tuple[Opening, ...]:
    """Return the openings behind which names are held: those whose marker is in a spelling, and headers of messages."""
    if format.reads.reasoning is not None:
        return format.reads.openings
    written = [before_name(spelling) for spelling in format.writes]
    openings = (opening for opening in format.reads.openings if not opening.is_common)
    return tuple(opening for opening in openings if any(opening.marker in text for text in written))


def before_name(spelling: Spelling) -> str:
    """Return the text of a first call up to its name, or up to the object that contains its name."""
    own = "" if isinstance(spelling.kind, JsonCall) else call_frame(spelling.kind, "").before
    return spelling.begin + spelling.open + own


class NamesWriter:
    """Writes the grammar for one format. `names`: at least one; `special_ids`: tokens that are not text."""

    def __init__(self, writer: LarkWriter, names: Sequence[str], format: Calls, special_ids: Iterable[int]):
        self._writer = writer
        self._names = names
        self._format = format
        self._has_headers = format.reads.reasoning is not None
        openings = (opening.marker for opening in held_openings(format))
        self._markers = HEADER_TAGS[1:] if self._has_headers else tuple(openings)
        self._special_ids = frozenset(special_ids)
        texts = [*HEADER_TAGS, *(before_name(one) for one in format.writes)]
        parts = dict.fromkeys(part for text in texts for part in writer.parts(text))
        self._own_tokens = [*filter(writer.is_token, parts)]
        self._white = f"({writer.terminal(_WHITE)})?"
        self._text = f"({writer.terminal(TEXT)})?"

    def grammar(self, crossed: Sequence[str]) -> str:
        """Return the grammar. `crossed`: beginnings of plain markers whose rest is the beginning of a token."""
        wholes, cuts = [f"{self._text} {self._special(self._markers)}"], list[str]()
        for marker in self._markers:
            before = self._before(marker)
            spellings = (one for one in self._format.writes if marker in before_name(one))
            calls = ((self._header, ""),) if self._has_headers else (self._call(one, marker) for one in spellings)
            for whole, cut in calls:
                wholes.append(f"{before} {whole}")
                cuts += [f"{before} {cut}"] if cut else []
        beginnings = "|".join(map(quoted_regex, crossed))
        last = self._writer.terminal(f"({TEXT}) & ~/(?s:.*)({beginnings})/" if crossed else TEXT)
        start = f"{either(wholes)}* {either([last, *cuts])}?"
        if self._has_headers:  # a reply can continue a header that the prompt has begun
            start = f"({self._writer.rule(f'/{_SPACES}*{_RECIPIENT}/', '[lazy]')} {self._recipient})? {start}"
        strings = self._strings()
        return grammars(f"{self._writer.build(start)}{_ARGUMENTS}{strings}")

    def _before(self, marker: str) -> str:
        """Return an expression for free text and a marker behind it, which no other expression then matches."""
        writer, parts = self._writer, self._writer.parts(marker)
        if not any(map(writer.is_token, parts)):
            return writer.rule(f"{writer.terminal(_UNQUOTED)} {literal(marker)}", "[lazy]")
        if writer.is_token(parts[0]):
            written = [self._text]
        else:
            written = [writer.terminal(f"/(?s:.*){quoted_regex(parts.pop(0))}/")]
        plain = [part for other in self._markers for part in writer.parts(other) if not writer.is_token(part)]
        for part in parts:
            if writer.is_token(part):
                written.append(writer.text(part))
            else:  # one tag may be the beginning of another
                begun = min((other for other in plain if part.startswith(other)), key=len)
                written.append(f"{writer.rule(literal(begun), '[lazy]')} {writer.text(part[len(begun) :])}")
        return " ".join(written)

    def _call(self, spelling: Spelling, marker: str) -> tuple[str, str]:
        """Write the text behind a marker: whole calls, and calls that are cut behind a name, or ""."""
        text = before_name(spelling).partition(marker)[2]
        kind, writer, white = spelling.kind, self._writer, self._white
        before = " ".join(self._loose(part) for part in writer.parts(text.removesuffix(FUNCTION_PREFIX)))
        if isinstance(kind, JsonCall):
            name = self._json(kind)
            further = writer.rule(self._further(spelling, marker, r"\{"), "[lazy]")
            return _listed(f'{before} {white} "{{" {name}', "}", f"{further} {name}")
        if not (text or marker).endswith(("=", '"')):
            before = f"{before} {white}"
        if isinstance(kind, NamedCall):
            name = self._name((FUNCTION_PREFIX, ""), is_numbered=kind.is_numbered)
            first = f"{before} {name} (/[^{{]+/ | {self._special(self._markers)})*"
            whole = f'{first} "{{" item* "}}"'
            if kind.trailer and not any(map(writer.is_token, writer.parts(kind.trailer))):
                whole += f" ({writer.rule(f'/{_SPACES}*/ {literal(kind.trailer.strip())}', '[lazy]')})?"
            return whole, f'{first} ("{{" cut)?'
        if behind := call_frame(kind, "").behind.strip():
            name = self._any_of(call_frame(kind, name).name for name in self._names)
            name = f"{name} {white if behind[0] == '>' else ''} {literal(behind[0])}"
        else:
            name = self._name(("",))
        if isinstance(kind, ExpressionCall):
            own = spelling.open.rpartition(marker)[2].strip()
            further = writer.rule(self._further(spelling, marker, quoted_regex(own)), "[lazy]")
            whole, cut = _listed(f"{before} {name}", kind.closer, f"{further} {white} {name}")
            other = writer.terminal(r"/[^\w \t\r\n]/")
            return f"{whole} ({further} {white} ({self._special()} | {other}))?", cut
        tags = kind.tags if isinstance(kind, XmlCall) else None
        if tags is None or any(map(writer.is_token, writer.parts(tags.end_parameter))):
            return f"{before} {name}", ""
        ends = tags.end_parameter, tags.end_function or spelling.close.strip()
        begin, end, close = map(self._up_to, (tags.parameter, *ends))
        first = f"{before} {name} ({begin} {end})*"
        return f"{first} {close}", f"{first} ({begin})? {self._text}"

    def _further(self, spelling: Spelling, marker: str, beginning: str) -> str:
        """Return a regular expression for the beginning of a further call in the same tags, with the text before it."""
        separator = "[,;]" if spelling.between.strip() or beginning else r"\n"
        return rf"/{_SPACES}*({separator}{_SPACES}*){'?' if beginning else ''}{beginning}/"

    @property
    def _header(self) -> str:
        """Return the header of a message up to its recipient, if it names one: that is held."""
        before = self._writer.bounded("/(?s:.*)/", HEADER_TAGS[:1])
        lead = self._writer.rule(f"{self._writer.terminal(before)} {literal(_RECIPIENT)}", "[lazy]")
        return f"({lead} {self._recipient})?"

    @property
    def _recipient(self) -> str:
        names = [*(prefix + name for name in self._names for prefix in (FUNCTION_PREFIX, "")), *sorted(READERS)]
        return f"{self._any_of(names)} (/[ \\t\\r\\n<]/ | {self._special(HEADER_TAGS[1:2])})"

    # Parts

    def _special(self, without: Iterable[str] = ()) -> str:
        """Return an expression for a token that is not text. No token may be in two sets of a grammar."""
        ids = self._special_ids.difference(map(self._writer.tokens.ids.get, self._own_tokens))
        ranges = (list(run) for _, run in groupby(enumerate(sorted(ids)), key=lambda at: at[1] - at[0]))
        others = f"<[{','.join(f'{run[0][1]}-{run[-1][1]}' for run in ranges)}]>"
        own = (self._writer.text(token) for token in self._own_tokens if token not in without)
        return either([*own, *([others] if ids else [])])

    def _up_to(self, tag: str) -> str:
        return self._writer.rule(f"/(?s:.*)/ {literal(tag)}", "[lazy]")

    def _loose(self, part: str) -> str:
        """Return a token, or plain text with the white space before it: free text may begin in the same way."""
        if self._writer.is_token(part):
            return f"{self._white} {self._writer.text(part)}"
        if not part.strip():
            return ""
        words = rf"{_SPACES}{{1,{_MAX_SPACES}}}".join(map(quoted_regex, part.split()))
        pattern = f"/{_SPACES}{{0,{_MAX_SPACES}}}{words}/"
        return f"({self._writer.terminal(pattern)})?" if part.strip() == "[" else self._writer.terminal(pattern)

    def _any_of(self, texts: Iterable[str]) -> str:
        """Return one lexeme for all texts: as many lexemes would exceed the limit of parser items."""
        return self._writer.terminal(either(map(literal, texts)))

    def _json(self, kind: JsonCall) -> str:
        """Return the members of an object up to the name, which is its first key or the value of a later one."""
        texts = [prefix + name for name in self._names for prefix in ((FUNCTION_PREFIX, "") if kind.name else ("",))]
        name = self._any_of(form for text in texts for form in (json.dumps(text), json.dumps(text, ensure_ascii=False)))
        white, writer = self._white, self._writer
        if not kind.name:
            return f'{white} {name} {white} ":"'
        other = writer.terminal(rf'/"[^"\\\x00-\x1F]{{0,64}}"/ & ~/"({"|".join(NAME_KEYS)})"/')
        value = writer.json({}, whitespace_flexible=True)
        member = writer.rule(f'{other} {white} ":" {white} {value} {white} "," {white}')
        key = either(literal(f'"{key}"') for key in NAME_KEYS)
        return f'{white} {member}{{0,{_MAX_MEMBERS}}} {key} {white} ":" {white} {name}'

    def _name(self, prefixes: Sequence[str], *, is_numbered: bool = False) -> str:
        """Return a name without quotes, and its end: a character that names do not contain, or a token."""
        name = self._any_of(prefix + name for name in self._names for prefix in prefixes)
        number = f'(":" {self._writer.terminal("/[0-9]{1,4}/")})?' if is_numbered else ""
        return f"{name} {number} ({_NAME_END} | {self._special(self._markers)})"

    def _strings(self) -> str:
        """Write the rules of strings in arguments, and of text between strings and brackets."""
        dialects = (one.kind.dialect.quotes for one in self._format.writes if isinstance(one.kind, ExpressionCall))
        quotes = next(dialects, ('"',))
        whole = (self._string(quote, quote) for quote in quotes)
        cut = (self._string(quote, "") for quote in quotes)
        plain = "".join(quote for quote in quotes if len(quote) == 1)
        return f"string: {either(whole)}\ncut_string: {either(cut)}\nOTHER: /[^{{}}\\[\\](){plain}]+/\n"

    def _string(self, quote: str, end: str) -> str:
        if self._writer.is_token(quote):
            return f"{self._writer.text(quote)} {self._text} {self._writer.text(end)}"
        if len(quote) > 1:
            begun = f"/{quoted_regex(quote)}(?s:.*)/"
            return self._writer.rule(f"{begun} {literal(end)}", "[lazy]") if end else self._writer.terminal(begun)
        return rf"/{quote}([^{quote}\\]|\\(?s:.))*{end or _CUT_ESCAPE}/"


def _listed(first: str, close: str, further: str) -> tuple[str, str]:
    """Return calls in a list, whole and cut behind a name."""
    return f'{first} item* "{close}" ({further} item* "{close}")*', f'{first} (item* "{close}" {further})* cut'
