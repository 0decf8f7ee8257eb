"""Describes a model family: one `Family` is one row of the table in `families`."""

import html
import json
from collections.abc import Container
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto

from .bodies import NewBody
from .bodies.literal_scanner import Dialect
from .bodies.xml_tags import XmlTags


class Place(Enum):
    """The places of a reply in which a tag counts."""

    ANYWHERE = auto()
    OUTSIDE_REASONING = auto()
    AT_START = auto()  # at the start of the content, also after reasoning and after a call


class ReasoningOpening(Enum):
    """The places where an opening tag opens reasoning. A grammar of the answer lets it open once, before the answer."""

    ANYWHERE = auto()
    AT_START = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True)
class Opening:
    """A tag that begins something with a body, mostly a call."""

    marker: str
    new_body: NewBody
    place: Place = Place.ANYWHERE
    keeps_marker: bool = False  # the body reads the tag again
    needs_tools: bool = False  # the tag is also common in text, so it counts only if tools are declared
    is_common: bool = False  # most texts with this tag are not calls, so names after it stay free


@dataclass(frozen=True, slots=True)
class Header:
    """The text that a family writes before an answer: `lead` if reasoning precedes it, then `answer`."""

    lead: str = ""
    answer: str = ""


NO_HEADER = Header()


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning and around an answer, for constraints on a reply."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]  # the end at each index belongs to the start at that index
    atoms: tuple[str, ...] = ()
    is_implied: bool = False
    header: Header = NO_HEADER

    def end_for(self, start: int) -> str:
        return self.ends[start] if start < len(self.ends) else self.ends[0]


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningFormat:
    """The reading of reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]  # dropped wherever they occur
    is_implied: bool = False  # the reply is reasoning until a closing tag, whether or not a tag opened it
    fills_content: bool = False  # if there is no other content, reasoning that the prompt did not open is also content
    is_shown: bool = False  # the reasoning is content, its tags included
    wrap: tuple[str, str] | None = None  # tags around the answer
    headers: tuple[Opening, ...] = ()  # begin messages; the header says whether a message is reasoning
    header_tags: tuple[str, ...] = ()  # occur inside `headers`
    headed: ReasoningTags | None = None  # set if reasoning and answer are separate messages
    atoms: tuple[str, ...] = ()  # tokens that are part of the tags, if a tag is not one token
    sign: str = ""  # a template that contains this text belongs to a model that reasons so

    @property
    def tags(self) -> tuple[str, ...]:
        headers = tuple(header.marker for header in self.headers)
        return (*self.opens, *self.closes, *(self.wrap or ()), *headers, *self.header_tags)

    @property
    def bounds(self) -> ReasoningTags:
        return self.headed or ReasoningTags(self.opens, self.closes, self.atoms, self.is_implied)


@dataclass(frozen=True, slots=True, eq=False)
class ToolFormat:
    """The reading of tool calls."""

    openings: tuple[Opening, ...]
    closes: tuple[str, ...] = ()  # tags that close a call or a section of calls; dropped after a call
    drops: tuple[str, ...] = ()  # tags that end a message; dropped
    inner_tags: tuple[str, ...] = ()  # occur inside bodies
    id_length: int | None = None  # length of call ids, if the family's template prescribes one
    reasoning: ReasoningFormat | None = None  # reads the headers of messages if no reasoning format was chosen
    is_fallback: bool = False  # finds calls of many families, to declared tools only

    @property
    def tags(self) -> tuple[str, ...]:
        opens = (opening.marker for opening in self.openings)
        return (*opens, *self.closes, *self.drops, *self.inner_tags)


# Spellings of calls: grammars write them by these values


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": "f", "arguments": {…}}`; the two keys are given. Without a `name` key: `{"f": {…}}`."""

    arguments: str = "arguments"
    name: str = "name"


@dataclass(frozen=True, slots=True)
class NamedCall:
    """`before`, the name, `behind`, the arguments as JSON, `trailer`."""

    before: str = ""
    behind: str = ""
    trailer: str = ""
    is_numbered: bool = False  # a colon and a number follow the name


@dataclass(frozen=True, slots=True)
class XmlCall:
    """A tag for each argument."""

    tags: XmlTags
    breaks: frozenset[str] = frozenset()  # line breaks follow these parts: head, key, value, parameter
    name_key: str = "name"  # the attribute that holds the name of the call
    kind: str = ""  # the attribute or tag that names the type of the value: "string" or "type"


@dataclass(frozen=True, slots=True)
class NestedXmlCall:
    """An element for each argument; every tag follows a prefix. A value other than text is JSON inside its element."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ExpressionCall:
    """`f(a=1, b="x")` or `f{a:1}`: the arguments are literals of the dialect."""

    dialect: Dialect
    opener: str
    closer: str
    separator: str = ", "


CallKind = JsonCall | NamedCall | XmlCall | NestedXmlCall | ExpressionCall


@dataclass(frozen=True, slots=True)
class Frame:
    """Text around arguments or a value: `before`, a name as plain text, `behind`, then them, `end`.

    All parts but `name` may contain tags.
    """

    before: str
    name: str
    behind: str
    end: str
    is_numbered: bool = False  # a colon and a number follow the name


def call_frame(kind: CallKind, name: str) -> Frame:
    """Return the texts around the arguments of a call to the tool `name`."""
    match kind:
        case JsonCall(name=""):
            return Frame("{", _quoted(name), ": ", "}")
        case JsonCall():
            return Frame(f'{{"{kind.name}": ', _quoted(name), f', "{kind.arguments}": ', "}")
        case NamedCall():
            return Frame(kind.before, name, kind.behind, kind.trailer, kind.is_numbered)
        case XmlCall(tags=tags):
            line = _break(kind, "head")
            if not tags.has_attributes:
                head_end = tags.head_end if tags.function else ""
                return Frame(tags.function, name, head_end + line, tags.end_function)
            before = f'{tags.function} {kind.name_key}="'
            return Frame(before, html.escape(name), f'"{tags.head_end}{line}', tags.end_function)
        case NestedXmlCall(prefix=prefix):
            return Frame(f'{prefix}<invoke name="', name, '">', f"{prefix}</invoke>")
        case ExpressionCall():
            return Frame("", name, kind.opener, kind.closer)


def argument_frame(kind: CallKind, key: str, *, is_text: bool = False) -> Frame:
    """Return the texts around the value of the argument `key`. `is_text`: the value is text rather than JSON."""
    match kind:
        case XmlCall(tags=tags):
            type_ = _type(kind, is_text)
            end = _break(kind, "value") + tags.end_parameter + _break(kind, "parameter")
            if tags.has_attributes:
                attribute = "key" if kind.name_key == "tool" else "name"
                behind = f'" {kind.kind}="{type_}"' if type_ else '"'
                return Frame(f'{tags.parameter} {attribute}="', html.escape(key), behind + tags.head_end, end)
            behind = f"{tags.head_end}{_break(kind, 'key')}"
            behind += f"{tags.type}{type_}{tags.end_type}" if type_ else ""
            return Frame(tags.parameter, key, f"{behind}{tags.value}{_break(kind, 'value')}", end)
        case NestedXmlCall(prefix=prefix):
            return Frame(f"{prefix}<", key, ">", f"{prefix}</{key}>")
        case ExpressionCall(dialect=dialect):
            return Frame("", key, dialect.assign, "")
        case JsonCall() | NamedCall():
            return Frame("{", _quoted(key), ": ", "}")


def _break(kind: XmlCall, place: str) -> str:
    return "\n" if place in kind.breaks else ""


def _type(kind: XmlCall, is_text: bool) -> str:
    """Return the type that a tag names, or "" if the family's tags name no types."""
    match kind.kind:
        case "":
            return ""
        case "string":
            return "true" if is_text else "false"
    return "string" if is_text else "object"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Spelling:
    """A reply's calls: `begin`, then each call between `open` and `close`, separated by `between`, then `end`."""

    kind: CallKind
    open: str = ""
    close: str = ""
    between: str = ""
    begin: str = ""
    end: str = ""
    is_single: bool = False  # a reply makes at most one call
    needs: str = ""  # a token that the tokenizer must have; without it the family's next spelling is used

    @property
    def marker(self) -> str:
        """Return the text by which the start of a call is recognised in free text."""
        return (self.begin or self.open).rstrip()


@dataclass(frozen=True, slots=True)
class Calls:
    """The reading and writing of a family's tool calls.

    Forced calls are written by the first spelling that the tokenizer allows. Names are held in all of them.
    """

    reads: ToolFormat
    writes: tuple[Spelling, ...]
    sign: str = ""  # a template that contains this text belongs to a model that makes such calls

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that open a call even inside reasoning."""
        return tuple(opening.marker for opening in self.reads.openings if opening.place is Place.ANYWHERE)

    def spelling(self, tokens: Container[str]) -> Spelling:
        """Return the spelling of calls for a tokenizer with these added tokens."""
        return next(one for one in self.writes if not one.needs or one.needs in tokens)


@dataclass(frozen=True, slots=True)
class Signature:
    """Matches a chat template that contains all of `texts` and none of `unless`."""

    texts: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def matches(self, template: str) -> bool:
        return all(text in template for text in self.texts) and not any(text in template for text in self.unless)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One model family. Detection reports the first of its names for each flag."""

    name: str
    reasoning: ReasoningFormat | None = None
    calls: Calls | None = None
    _: KW_ONLY
    aliases: tuple[str, ...] = ()
    reasoning_names: tuple[str, ...] = ()  # values of `reasoning_parser`, if they are not `name` and `aliases`
    call_names: tuple[str, ...] = ()  # values of `tool_call_parser`, if they are not `name` and `aliases`
    reasoning_signs: tuple[str | Signature, ...] = ()  # a template that matches one belongs to a model that reasons so
    call_signs: tuple[str | Signature, ...] = ()  # the same for calls; without them, the sign of the format counts
    reasoning_tokens: tuple[str, ...] = ()  # a vocabulary that has all of them counts if the template says nothing
    call_tokens: tuple[str, ...] = ()

    @property
    def reasoning_choices(self) -> tuple[str, ...]:
        return self.reasoning_names or (self.name, *self.aliases)

    @property
    def call_choices(self) -> tuple[str, ...]:
        return self.call_names or (self.name, *self.aliases)

    def reasons_in(self, template: str) -> bool:
        """Return whether the chat template belongs to a model that reasons as this family does."""
        return _matches(template, self.reasoning_signs, self.reasoning)

    def calls_in(self, template: str) -> bool:
        """Return whether the chat template belongs to a model that makes calls as this family does."""
        return _matches(template, self.call_signs, self.calls)


def _matches(template: str, signs: tuple[str | Signature, ...], format: ReasoningFormat | Calls | None) -> bool:
    if not signs and format is not None and format.sign:
        return format.sign in template
    return any(sign in template if isinstance(sign, str) else sign.matches(template) for sign in signs)
