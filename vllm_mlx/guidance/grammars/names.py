"""Writes grammars in which the name of a call is one of the declared names, and all else is as the parser reads it."""

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...formats.bodies.heads import (
    BehindHead,
    ChoiceHead,
    Head,
    JsonHead,
    ListHead,
    NameHead,
    RecipientHead,
    TagHead,
)
from .guide_grammar import grammars
from .lark import TEXT, LarkWriter, either, literal, quoted_regex

_SPACES = r"[ \t\r\n]"
_MAX_SPACES = 16  # a weak model would write them for ever
_WHITE = rf"/{_SPACES}{{1,{_MAX_SPACES}}}/"
_RECIPIENT_ENDS = " \t\r\n<"
_NEVER = r"\x00"
_MAX_MEMBERS = 8  # members of an object before its name
_OTHER_ATTRIBUTE = r'/[A-Za-z_-]{1,32}="[^"<>\n]{0,128}"/'


@dataclass(frozen=True, slots=True)
class Lead:
    """The text from where a name is held up to its end: after a marker, after a call of a list, or in a plain marker.

    `is_open`: text that is no call may follow instead.
    """

    expression: str
    is_open: bool = False


class NameWriter:
    """Writes heads for some names. `tags`: the texts that the format's parser reads as tags."""

    def __init__(self, writer: LarkWriter, names: Sequence[str], tags: Iterable[str]):
        self._writer = self.writer = writer
        self._names = names
        self._tags = tuple(tag for tag in dict.fromkeys(tags) if writer.is_token(tag))

    def behind(self, head: Head) -> Lead | None:
        """Return the lead after the marker of a call; None: no declared name can be written there."""
        expression = self._head(head)
        return None if expression is None else Lead(expression, _is_open(head))

    def behind_marker(self, head: Head, marker: str) -> Lead | None:
        """Return the lead after `marker`, which is the beginning of the head itself."""
        expression = self._inside(head, marker)
        return None if expression is None else Lead(expression)

    def _inside(self, head: Head, marker: str) -> str | None:
        match head:
            case ListHead(is_first=True) if not head.needs_opener:
                return self._inside(head.call, marker)
            case TagHead() if marker == head.function:
                return self._in_tag(head)
            case TagHead() if marker == f"{head.function} name=":
                return self._attribute_rest(head, "")
            case RecipientHead() if marker == head.marker:
                return self._name(_RECIPIENT_ENDS, [head.prefix, ""], others=head.others)
        return None

    def spelled(self, rests: Sequence[tuple[str, str]]) -> Lead:
        """Return the lead after the beginning of a plain marker. `rests`: each plain marker, and the lead after it."""
        options = (f"{self._writer.rule(f'/(?s:.*)/ {literal(marker)}', '[lazy]')} {rest}" for marker, rest in rests)
        return Lead(either(options), is_open=True)

    def _head(self, head: Head) -> str | None:
        """Return the head after white space. That and a tag are one lexeme, because free text may begin like both."""
        match head:
            case JsonHead():
                return self._json(head)
            case NameHead():
                name = self._name(head.ends, [head.prefix, ""] if head.prefix else [""], numbered=head.is_numbered)
                return None if name is None else f"{self._white} {name}"
            case TagHead():
                inner = self._in_tag(head)
                return None if inner is None else f"{self._behind_white(head.function)} {inner}"
            case RecipientHead():
                return self._recipient(head)
            case BehindHead():
                return self._behind(head)
            case ChoiceHead():
                options = [option for inner in head.heads if (option := self._head(inner)) is not None]
                return either(options) if options else None
            case ListHead():
                return self._listed(head)

    # Parts

    @property
    def _white(self) -> str:
        return f"({self._writer.terminal(_WHITE)})?"

    @property
    def _rest(self) -> str:
        return f"({self._writer.terminal(TEXT)})?"

    def _behind_white(self, text: str) -> str:
        plain, rest = self._writer.split_tokens(text)
        if not plain:
            return f"{self._white} {self._writer.text(rest)}"
        begin = self._writer.terminal(f"/{_SPACES}{{0,{_MAX_SPACES}}}{quoted_regex(plain)}/")
        return f"{begin} {self._writer.text(rest)}".strip()

    def _behind(self, head: BehindHead) -> str | None:
        then = self._head(head.then)
        if then is None:
            return None
        behind = f"{either(map(self._behind_white, head.texts))} {then}"
        return f"({behind} | {then})" if head.is_optional else behind

    def _any_of(self, texts: Iterable[str]) -> str | None:
        """Return one lexeme for all texts: as many lexemes would exceed the limit of parser items."""
        written = list(texts)
        return self._writer.terminal(either(map(literal, written))) if written else None

    def _json(self, head: JsonHead) -> str | None:
        prefixes = dict.fromkeys((head.prefix, ""))
        texts = [prefix + name for name in self._names for prefix in prefixes]
        name = self._any_of(form for text in texts for form in (json.dumps(text), json.dumps(text, ensure_ascii=False)))
        if name is None:
            return None
        white, writer = self._white, self._writer
        if not head.keys:
            return f'{white} "{{" {white} {name} {white} ":" {self._rest}'
        keys = "|".join(map(quoted_regex, head.keys))
        other = writer.terminal(rf'/"[^"\\\x00-\x1F]{{0,64}}"/ & ~/"({keys})"/')
        value = writer.json({}, whitespace_flexible=True)
        member = writer.rule(f'{other} {white} ":" {white} {value} {white} "," {white}')
        key = either(literal(f'"{key}"') for key in head.keys)
        return f'{white} "{{" {white} {member}{{0,{_MAX_MEMBERS}}} {key} {white} ":" {white} {name} {self._rest}'

    def _name(
        self, ends: str, prefixes: Sequence[str], *, numbered: bool = False, others: Sequence[str] = ()
    ) -> str | None:
        names = [name for name in self._names if name and not any(char in ends for char in name)]
        prefixed = [prefix + name for name in names for prefix in prefixes]
        plain = names if numbered else prefixed
        options = [] if (name := self._any_of([*plain, *others] if plain else [])) is None else [name]
        if numbered and (name := self._any_of(prefixed)):
            options.append(f'{name} ":" {self._writer.terminal("/[0-9]{1,4}/")}')
        if not options:
            return None
        end = [self._writer.terminal(rf"/[{quoted_class(ends)}](?s:.*)/"), *map(self._writer.text, self._tags)]
        return f"{either(options)} {either(end)}"

    def _in_tag(self, head: TagHead) -> str | None:
        if head.attributes:
            return self._in_attributes(head)
        name = self._any_of(name for name in self._names if name == name.strip() and not re.search(r"[<>\n]", name))
        return None if name is None else f"{name} {self._white} {self._writer.text(head.head_end)} {self._rest}"

    def _in_attributes(self, head: TagHead) -> str | None:
        options = [rest for key in head.attributes if (rest := self._attribute_rest(head, f"{key}="))]
        if not options:
            return None
        before = self._others(head, "{attribute} {white}")
        return f"{self._writer.terminal(_WHITE)} {before} {either(options)}"

    def _attribute_rest(self, head: TagHead, before: str) -> str | None:
        """Return `before`, the quoted name, and the rest of the tag."""
        names = [html.escape(name) if head.is_escaped else name for name in self._names]
        readable = [name for name in names if not re.search(r"[<>\n\"']", name)]
        name = self._any_of(f"{before}{quote}{name}{quote}" for name in readable for quote in ('"', "'"))
        if name is None:
            return None
        behind = self._others(head, "{white} {attribute}")
        return f"{name} {behind} {self._white} {self._writer.text(head.head_end)} {self._rest}"

    def _others(self, head: TagHead, form: str) -> str:
        if not head.is_escaped:
            return ""
        names = "|".join(head.attributes)
        attribute = self._writer.terminal(f"{_OTHER_ATTRIBUTE} & ~/({names})=(?s:.*)/")
        return f"({form.format(attribute=attribute, white=self._writer.terminal(_WHITE))}){{0,4}}"

    def _recipient(self, head: RecipientHead) -> str | None:
        name = self._name(_RECIPIENT_ENDS, [head.prefix, ""], others=head.others)
        if name is None:
            return None
        without = f"(?s:.*){quoted_regex(head.marker)}(?s:.*)"
        tags = either(map(self._writer.text, self._tags)) if self._tags else ""
        before = f"(({self._text(without)})? {tags})*" if tags else ""
        lead = self._writer.terminal(f"(/(?s:.*)/ & ~/{without}/) {literal(head.marker)}")
        return f"{before} ({lead} {name} | {self._unfinished(without)})"

    def _listed(self, head: ListHead) -> str | None:
        call, white = self._head(head.call), self._white
        if call is None:
            return None
        if head.is_first:
            opener = literal(head.opener) if head.opener else ""
            if not head.needs_opener:
                return f"({white} {opener})? {call}" if opener else call
            return f"({white} {opener} {call} | {self._text_without(quoted_regex(head.opener))})"
        begins = _begins(head.call)
        separators = f"[{quoted_class(head.separators)}]" if head.separators else ""
        plain = self._text_without("|".join(filter(None, (separators, begins))))
        if not separators:
            return f"({call} | {plain})"
        separated = f"{white} {self._writer.terminal(f'/{separators}/')}"
        return f"({separated} ({call} | {self._text_without(begins)}) | {call} | {plain})"

    def _text_without(self, beginning: str) -> str:
        """Return text that does not begin with `beginning`, or with white space and `beginning`."""
        return self._unfinished(rf"{_SPACES}*({beginning})(?s:.*)")

    def _unfinished(self, without: str) -> str:
        """Return text that does not match `without`. It never ends, because only a name completes a lead."""
        return f"{self._text(without)} {self._writer.terminal(f'/{_NEVER}/')}"

    def _text(self, without: str) -> str:
        return self._writer.terminal(rf"/[^{_NEVER}]+/ & ~/{without}/")


def name_grammar(leads: Sequence[Lead], writer: LarkWriter) -> str:
    """Write one grammar for all leads. A character of `CHOICES` chooses one: a matcher reads that character first."""
    assert len(leads) <= len(CHOICES), "a format has few leads"
    options = (f"{literal(choice)} {lead.expression}" for choice, lead in zip(CHOICES, leads, strict=False))
    return grammars(writer.build(either(options)))


CHOICES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def further(head: Head) -> Iterator[ListHead]:
    """List the heads of further calls inside the same tags."""
    match head:
        case ListHead():
            yield ListHead(head.call, head.separators, is_first=False)
        case BehindHead():
            yield from further(head.then)
        case ChoiceHead():
            for inner in head.heads:
                yield from further(inner)


def quoted_class(chars: str) -> str:
    return "".join(quoted_regex(char) if char in "\n\t\r" or not char.isalnum() else char for char in chars)


def _is_open(head: Head) -> bool:
    return isinstance(head, RecipientHead) or (isinstance(head, ListHead) and (head.needs_opener or not head.is_first))


def _begins(head: Head) -> str:
    """Return a regular expression for the beginning of a call. Tokens are left out, because no text contains them."""
    match head:
        case JsonHead():
            return r"\{"
        case NameHead():
            return r"[\w]"
        case TagHead():
            return quoted_regex(head.function)
        case BehindHead(is_optional=False):
            return "|".join(map(quoted_regex, head.texts))
        case BehindHead():
            return "|".join((*map(quoted_regex, head.texts), _begins(head.then)))
        case ChoiceHead():
            return "|".join(map(_begins, head.heads))
        case ListHead():
            return "|".join(filter(None, (quoted_regex(head.opener), _begins(head.call))))
    return r"\z"
