"""How a family writes tool calls, as data: grammars write calls by it. Knows no grammar and no family."""

from dataclasses import dataclass

from .bodies.expression_body import Dialect
from .bodies.xml_body import XmlTags


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": "f", "arguments": {…}}`; the two keys are given."""

    arguments: str = "arguments"
    name: str = "name"


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """`{"f": {…}}`: the name is the key of the arguments."""


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
    kind: str = ""  # the attribute or tag that says which type the value has: "string" or "type"


@dataclass(frozen=True, slots=True)
class NestedXmlCall:
    """An element for each argument; every tag follows a prefix. A value that is no text is JSON inside its element."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ExpressionCall:
    """`f(a=1, b="x")` or `f{a:1}`: the arguments are literals of the dialect."""

    dialect: Dialect
    opener: str
    closer: str
    separator: str = ", "


CallKind = JsonCall | KeyedCall | NamedCall | XmlCall | NestedXmlCall | ExpressionCall


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
        """The text by which the start of a call is recognised in free text."""
        return (self.begin or self.open).rstrip()
